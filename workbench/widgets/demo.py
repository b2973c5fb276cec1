"""`workbench demo`: open JupyterLab on a copy of a notebook that has its results already."""

from __future__ import annotations

import os
import posixpath
import re
import socket
import sysconfig
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from workbench.errors import require

FOLDER = "workbench-demo"
FIRST = "two_minutes"  # the introduction, opened by default
# documentation pages that notebooks link to
_LINKED = ("benchmarks.md", "limitations.md", "how_to/keras.md", "how_to/own_data.md", "how_to/train.md")
_IMPORTED = ("published.py",)  # modules of the benchmarks that notebooks import


def add_demo(commands: Any) -> None:
    """Add the `demo` command to the subparsers of the command line."""
    demo = commands.add_parser(
        "demo",
        help="open JupyterLab on a demonstration notebook with its results",
        description=f"Open JupyterLab on a copy of a notebook, in the subfolder {FOLDER} of the current folder, with copies of all it links to. "
        f"A new copy of {FIRST} is run first, which takes up to a minute. An existing copy is opened as it is.",
        epilog="example: workbench demo explorer",
    )
    demo.add_argument("name", nargs="?", default=FIRST, help=f"name of the notebook (default: {FIRST})")
    demo.add_argument(
        "--port", type=int, metavar="N", help="port of the server (default: the first free one from 8888)"
    )
    demo.add_argument("--no-browser", action="store_true", help="only print the address, don't open a browser")
    demo.set_defaults(command=lambda a: demo_lab(a.name, port=a.port, browser=not a.no_browser))


def demo_lab(name: str, *, port: int | None, browser: bool) -> int:
    """Start JupyterLab on a copy of a notebook, and return when it has ended.

    Args:
        name: name of the notebook, such as "two_minutes", "comparison" or "explorer".
        port: port of the server; the first free one from 8888 if None.
        browser: whether to open it in the browser.

    Returns:
        The exit status 0.

    Raises:
        ValueError: if there is no such notebook, or the port is taken.
        ModuleNotFoundError: if JupyterLab is not installed.
        OSError: if the copy can't be written.
    """
    require("jupyterlab")
    if port is not None:
        _check_port(port)
    path = copy_notebooks(name, Path.cwd() / FOLDER)
    if path.stem == FIRST:
        run_once(path)
    print(f"notebook: {path}")
    require("jupyterlab.labapp").LabApp.launch_instance(arguments(path, port, browser))
    return 0


def arguments(path: Path, port: int | None, browser: bool) -> list[str]:
    """Return the command-line arguments of JupyterLab."""
    options = [f"--ServerApp.root_dir={path.parent}", f"--LabApp.default_url=/lab/tree/{path.name}"]
    options += ["--ServerApp.log_level=WARN"]  # still prints the address
    options += [] if port is None else [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    options += [] if browser else ["--no-browser"]
    # users of containers are root; the server listens on this machine only, and asks for a token
    return [*options, *(["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else [])]


def copy_notebooks(name: str, folder: Path) -> Path:
    """Copy all notebooks, with the modules they import and the pages they link to, to a folder; return the path of one of them.

    Existing files are not overwritten.
    """
    known = {path.stem: path for path in sorted(notebooks_folder().glob("*.ipynb"))}
    source = known.get(name.removesuffix(".ipynb"))
    if source is None:
        raise ValueError(f"there is no notebook {name!r}; choose one of {', '.join(known)}")
    (folder / "docs" / "how_to").mkdir(parents=True, exist_ok=True)
    home = source.parents[1]
    for notebook in known.values():
        # the server shows no files outside the folder
        _write(folder / notebook.name, notebook.read_bytes().replace(b"](../docs/", b"](docs/"))
    for module in _IMPORTED:
        _write(folder / module, (home / "benchmarks" / module).read_bytes())
    served = {path.name for path in known.values()} | {f"docs/{page}" for page in _LINKED}
    for page in _LINKED:
        text = (home / "docs" / page).read_text(encoding="utf-8")
        _write(folder / "docs" / page, _relinked(text, PurePosixPath("docs", page), served).encode())
    return folder / source.name


def _relinked(text: str, page: PurePosixPath, served: set[str]) -> str:
    """Adapt the links of a page to the folder; replace links to repository files that are not there by their text."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        if "://" in target or not target:
            return match[0]
        place = posixpath.normpath(page.parent / target).removeprefix("notebooks/")
        return f"[{words}]({posixpath.relpath(place, page.parent)}{anchor})" if place in served else words

    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)((?:#[^)\s]*)?)\)", link, text)


def run_once(path: Path) -> None:
    """Run a notebook that has no outputs, and save it with them; a notebook that fails is left unchanged."""
    from workbench.notebook.parameters import load_notebook
    from workbench.notebook.run import run_notebook

    if any(cell.get("outputs") for cell in load_notebook(path).cells):
        return
    print(f"running {path.name} once, to train its models ...", flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".run-") as folder:
        run = run_notebook(path, Path(folder) / path.name, progress=True)
        if run.status == "ok":
            Path(run.output).replace(path)
        else:
            print(f"{path.name} failed and is opened without results: {run.error}")


def _write(path: Path, content: bytes) -> None:
    if not path.exists():
        path.write_bytes(content)


def notebooks_folder() -> Path:
    """Return the folder of the notebooks, in the repository of this package or where they were installed with it.

    Raises:
        ValueError: if there are none.
    """
    repository = Path(__file__).parents[2] / "notebooks"
    installed = Path(sysconfig.get_path("data")) / "share" / "workbench" / "notebooks"
    for folder in (repository, installed):
        if (folder / "comparison.ipynb").is_file():
            return folder
    raise ValueError(f"the notebooks are not installed: neither {repository} nor {installed} holds comparison.ipynb")


def _check_port(port: int) -> None:
    if not 0 < port < 65536:
        raise ValueError(f"--port must be a number from 1 to 65535; found {port}")
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} can't be used ({error.strerror}); choose another, or leave --port out"
            ) from None
