"""`workbench demo`: JupyterLab on a copy of a notebook, with its results, ready to click."""

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
FIRST = "two_minutes"  # the notebook that shows what all of this is for
# pages of the documentation that notebooks lead to
_LINKED = ("benchmarks.md", "limitations.md", "how_to/keras.md", "how_to/own_data.md", "how_to/train.md")
_IMPORTED = ("published.py",)  # modules of the benchmarks that notebooks import


def add_demo(commands: Any) -> None:
    """Add the command to the command line's parser."""
    demo = commands.add_parser(
        "demo",
        help="open JupyterLab on results of two small models, and on what to change next",
        description=f"Open JupyterLab on a copy of a notebook, in the folder {FOLDER} here, beside copies of those that it leads to. "
        f"A new copy of {FIRST} is run first, which takes seconds to a minute. A copy that is there already is opened as it is.",
        epilog="example: workbench demo explorer",
    )
    demo.add_argument("name", nargs="?", default=FIRST, help=f"of the notebook (default: {FIRST})")
    demo.add_argument("--port", type=int, metavar="N", help="of the server (default: the first free one from 8888 on)")
    demo.add_argument("--no-browser", action="store_true", help="open no browser, only print the address")
    demo.set_defaults(command=lambda a: demo_lab(a.name, port=a.port, browser=not a.no_browser))


def demo_lab(name: str = FIRST, *, port: int | None = None, browser: bool = True) -> int:
    """Start JupyterLab on a copy of a notebook, and return when it has ended.

    Args:
        name: of the notebook, such as "two_minutes", "comparison" or "explorer".
        port: of the server; None: the first free one from 8888 on.
        browser: whether to open it in the browser.

    Returns:
        0.

    Raises:
        ValueError: there is no such notebook, or the port is taken.
        ModuleNotFoundError: JupyterLab is not installed.
        OSError: the copy can't be written.
    """
    require("jupyterlab")
    if port is not None:
        _check_port(port)
    path = copied(name, Path.cwd() / FOLDER)
    if path.stem == FIRST:
        run_once(path)
    print(f"notebook: {path}")
    require("jupyterlab.labapp").LabApp.launch_instance(arguments(path, port, browser))
    return 0


def arguments(path: Path, port: int | None, browser: bool) -> list[str]:
    """What JupyterLab is started with."""
    options = [f"--ServerApp.root_dir={path.parent}", f"--LabApp.default_url=/lab/tree/{path.name}"]
    options += ["--ServerApp.log_level=WARN"]  # the address is printed all the same
    options += [] if port is None else [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    options += [] if browser else ["--no-browser"]
    # in a container everybody is root; the server listens on this machine only, and asks for a token
    return [*options, *(["--allow-root"] if getattr(os, "geteuid", lambda: 1)() == 0 else [])]


def copied(name: str, folder: Path) -> Path:
    """A copy of a notebook in a folder, with all other notebooks and what they import and lead to; what is there is left as it is."""
    known = {path.stem: path for path in sorted(notebooks_folder().glob("*.ipynb"))}
    source = known.get(name.removesuffix(".ipynb"))
    if source is None:
        raise ValueError(f"there is no notebook {name!r} to demonstrate; there are {', '.join(known)}")
    (folder / "docs" / "how_to").mkdir(parents=True, exist_ok=True)
    home = source.parents[1]
    for notebook in known.values():
        # the server shows nothing outside of the folder
        _write(folder / notebook.name, notebook.read_bytes().replace(b"](../docs/", b"](docs/"))
    for module in _IMPORTED:
        _write(folder / module, (home / "benchmarks" / module).read_bytes())
    served = {path.name for path in known.values()} | {f"docs/{page}" for page in _LINKED}
    for page in _LINKED:
        text = (home / "docs" / page).read_text(encoding="utf-8")
        _write(folder / "docs" / page, _relinked(text, PurePosixPath("docs", page), served).encode())
    return folder / source.name


def _relinked(text: str, page: PurePosixPath, served: set[str]) -> str:
    """A page's text with links to what is in the folder; of other links within the repository only the words are left."""

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        if "://" in target or not target:
            return match[0]
        place = posixpath.normpath(page.parent / target).removeprefix("notebooks/")
        return f"[{words}]({posixpath.relpath(place, page.parent)}{anchor})" if place in served else words

    return re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)((?:#[^)\s]*)?)\)", link, text)


def run_once(path: Path) -> None:
    """Put the results of a notebook into it, unless it has some; one that fails stays as it is, and says so when it is run."""
    from workbench.notebook.parameters import load_notebook
    from workbench.notebook.run import run_notebook

    if any(cell.get("outputs") for cell in load_notebook(path).cells):
        return
    print(f"training the models of {path.name}, once ...", flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".run-") as folder:
        run = run_notebook(path, Path(folder) / path.name, progress=True)
        if run.status == "ok":
            Path(run.output).replace(path)
        else:
            print(f"it could not be run, and opens without results: {run.error}")


def _write(path: Path, content: bytes) -> None:
    if not path.exists():
        path.write_bytes(content)


def notebooks_folder() -> Path:
    """The notebooks of the repository that this package is run from, or those that were installed with it.

    Raises:
        ValueError: there are none.
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
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} can't be used ({error.strerror}); choose another, or leave --port out"
            ) from None
