"""Finding, downloading and verifying files, against a server on this machine; no test needs a network."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from workbench import data
from workbench.data import files, usage
from workbench.data.data_set import digest
from workbench.data.registry import entries

YACHT = "uci-regression/yacht.npz"


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, no data folder, no checkout, no wait before a second attempt, and no proxy between us and the server."""
    monkeypatch.delenv("WORKBENCH_DATA", raising=False)
    monkeypatch.setattr(files, "REPOSITORY", tmp_path / "nowhere")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(variable, "127.0.0.1")
    return tmp_path / "cache" / "workbench"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """A server that writes into the test output hides what matters."""


@pytest.fixture
def server(tmp_path):
    """The folder that a local server shows, and its address."""
    folder = tmp_path / "server"
    folder.mkdir()
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


@pytest.fixture
def table():
    """A small stand-in for the yacht set: 6 features, 20 splits of 10 rows."""
    rng = np.random.default_rng(0)
    orders = np.stack([rng.permutation(10) for _ in range(20)]).astype(np.int32)
    return {
        "X": rng.normal(size=(10, 6)),
        "y": rng.normal(size=10),
        "train_idx": orders[:, :8],
        "test_idx": orders[:, 8:],
    }


@pytest.fixture
def yacht(monkeypatch, table, server):
    """The registry's yacht set, with the checksum of the stand-in and the local server as its source."""
    entry = entries()["yacht"]
    monkeypatch.setitem(entry, "files", {YACHT: digest(table)})
    monkeypatch.setitem(entry, "addresses", [server[1]])
    return entry


def write_text_files(folder, table):
    """The layout of the source: a table whose columns are named by index files, one pair of index files a split."""
    np.savetxt(folder / "data.txt", np.column_stack([table["y"], table["X"], table["y"] * 0]), fmt="%.17g")
    np.savetxt(folder / "index_features.txt", np.arange(1, 7), fmt="%d")
    np.savetxt(folder / "index_target.txt", [0])
    for k in range(20):
        np.savetxt(folder / f"index_train_{k}.txt", table["train_idx"][k])
        np.savetxt(folder / f"index_test_{k}.txt", table["test_idx"][k], fmt="%d")


def write_npz(root, table):
    (root / YACHT).parent.mkdir(parents=True)
    np.savez_compressed(root / YACHT, **table)
    return root / YACHT


def leftovers(cache):
    return [path for path in cache.rglob("*") if path.is_file()]


def test_local_folder_comes_first_and_splits_are_the_indices(monkeypatch, cache, yacht, table, tmp_path):
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "mine"))
    path = write_npz(tmp_path / "mine", table)
    d = data.load("yacht", split=7)
    rows = table["test_idx"][7]
    np.testing.assert_array_equal(d.test.x.numpy(), table["X"][rows].astype(np.float32))
    np.testing.assert_array_equal(d.test.y.numpy()[:, 0], table["y"][rows].astype(np.float32))
    assert len(d.train) == 8
    assert d.features[-1].name == "Froude number"
    assert data.fetch("yacht") == [path]
    assert not cache.exists()


def test_uci_text_files_become_one_npz_in_the_cache(cache, yacht, table, server):
    write_text_files(server[0], table)
    d = data.load("yacht", split=3)
    assert leftovers(cache) == [cache / YACHT]
    with np.load(cache / YACHT) as archive:
        for name, array in table.items():
            np.testing.assert_array_equal(archive[name], array)
    (server[0] / "data.txt").unlink()  # now only the cache can answer
    assert data.load("yacht", split=3).checksum == d.checksum


def test_wrong_checksum_deletes_the_download_and_says_so(cache, yacht, table, server):
    table["y"] = table["y"] + 1e-9
    write_text_files(server[0], table)
    checksum = digest(table)
    with pytest.raises(ValueError, match=f"sha256 {checksum}, expected {yacht['files'][YACHT]}; it was deleted"):
        data.load("yacht")
    assert leftovers(cache) == []


def test_a_login_page_instead_of_data_is_wrong_content(cache, yacht, table, server):
    write_text_files(server[0], table)
    (server[0] / "data.txt").write_text("<html>please log in</html>")
    with pytest.raises(ValueError, match="gave something unreadable"):
        data.load("yacht")
    assert leftovers(cache) == []


def test_missing_file_names_address_places_and_remedies(monkeypatch, cache, yacht, server, tmp_path):
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "mine"))
    with pytest.raises(FileNotFoundError) as caught:
        data.load("yacht")
    message = str(caught.value)
    for part in (
        f"{server[1]}data.txt answered 404",
        str(tmp_path / "mine" / YACHT),
        str(cache / YACHT),
        "Set WORKBENCH_DATA to a folder",
        "workbench data fetch yacht",
    ):
        assert part in message
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert leftovers(cache) == []


def test_no_network_is_told_plainly(monkeypatch, cache, yacht):
    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as closed:
        port = closed.server_port
    monkeypatch.setitem(yacht, "addresses", [f"http://127.0.0.1:{port}/"])
    with pytest.raises(FileNotFoundError, match=r"could not be reached \(.*refused"):
        data.fetch("yacht")
    assert leftovers(cache) == []


def test_second_mirror_is_asked_when_the_first_fails(monkeypatch, cache, yacht, table, server):
    write_text_files(server[0], table)
    monkeypatch.setitem(yacht, "addresses", [server[1] + "gone/", server[1]])
    assert data.fetch("yacht") == [cache / YACHT]


@pytest.mark.parametrize("damage", ["other numbers", "cut short", "not a zip", "empty"])
def test_damaged_local_file_is_named_with_both_checksums(monkeypatch, cache, yacht, table, tmp_path, damage):
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "mine"))
    expected = yacht["files"][YACHT]
    if damage == "other numbers":
        table["X"][4, 2] += 1
    path = write_npz(tmp_path / "mine", table)
    content = path.read_bytes()
    path.write_bytes({"cut short": content[:-200], "not a zip": b"hello", "empty": b""}.get(damage, content))
    checksum = digest(table) if damage == "other numbers" else "something unreadable"
    with pytest.raises(
        ValueError, match=f"is damaged: expected content with sha256 {expected}, found {checksum}"
    ) as caught:
        data.load("yacht")
    assert str(path) in str(caught.value)
    assert caught.value.__context__ is None
    assert path.exists()  # the user's own file: theirs to delete


@pytest.fixture
def images(monkeypatch, server):
    """A stand-in for MNIST: 200 + 40 random images, served as idx files packed at another level than any original."""
    rng = np.random.default_rng(1)
    parts, checksums = {}, {}
    for part, n in (("train", 200), ("t10k", 40)):
        pixels, labels = rng.integers(0, 256, (n, 28, 28), np.uint8), (np.arange(n) % 10).astype(np.uint8)
        parts[part] = (pixels, labels)
        for name, array in ((f"{part}-images-idx3-ubyte.gz", pixels), (f"{part}-labels-idx1-ubyte.gz", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            raw = header + array.tobytes()
            checksums[f"mnist/{name}"] = hashlib.sha256(raw).hexdigest()
            (server[0] / name).write_bytes(gzip.compress(raw, 1))
    monkeypatch.setitem(entries()["mnist"], "files", checksums)
    monkeypatch.setitem(entries()["mnist"], "addresses", [server[1]])
    return parts


def test_images_are_downloaded_and_scaled(cache, images):
    d = data.load("mnist")
    pixels, labels = images["train"]
    assert d.input_shape == (1, 28, 28)
    np.testing.assert_array_equal(d.train.x.numpy()[:, 0], pixels.astype(np.float32) / 255)
    np.testing.assert_array_equal(d.train.y.numpy(), labels)
    np.testing.assert_array_equal(d.test.y.numpy(), images["t10k"][1])
    assert len(leftovers(cache)) == 4


def test_image_subsets_are_seeded_and_stratified(cache, images):
    whole = data.load("mnist")
    d = data.load("mnist", n_train=50, n_test=20)
    assert torch.bincount(d.train.y).tolist() == [5] * 10
    assert torch.bincount(d.test.y).tolist() == [2] * 10
    known = {image.numpy().tobytes(): int(label) for image, label in zip(whole.train.x, whole.train.y, strict=True)}
    assert all(known[image.numpy().tobytes()] == label for image, label in zip(d.train.x, d.train.y, strict=True))
    assert data.load("mnist", n_train=50, n_test=20).checksum == d.checksum
    assert data.load("mnist", n_train=50, n_test=20, seed=1).checksum != d.checksum
    assert data.load("mnist", n_train=200).checksum == whole.checksum
    for wrong in (0, 9, 195, 201):
        with pytest.raises(ValueError, match=f"n_train must be 200 .* between 10 .* and 190; found {wrong}"):
            data.load("mnist", n_train=wrong)


def test_damaged_image_file_is_named(cache, images):
    data.fetch("mnist")
    path = cache / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(b"\0\0\x0d\1" + bytes(8)))  # floats, not bytes
    with pytest.raises(ValueError, match=r"t10k-labels.* is damaged.*not an idx file of uint8"):
        data.load("mnist")


def test_cache_falls_back_to_the_home_folder(monkeypatch, yacht, table, tmp_path):
    monkeypatch.setattr(files, "REPOSITORY", tmp_path / "nowhere")
    monkeypatch.delenv("WORKBENCH_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_npz(tmp_path / ".cache" / "workbench", table)
    assert data.fetch("yacht") == [path]
    assert os.listdir(tmp_path / ".cache" / "workbench" / "uci-regression") == ["yacht.npz"]


# ---- a checkout of the repository
@pytest.fixture
def checkout(monkeypatch, cache, tmp_path):
    """A repository that the package seems to be imported from."""
    repository = tmp_path / "repository"
    (repository / "datasets").mkdir(parents=True)
    (repository / "pyproject.toml").touch()
    (repository / "datasets" / "README.md").touch()
    monkeypatch.setattr(files, "REPOSITORY", repository)
    return repository / "datasets"


def test_downloads_of_a_checkout_go_to_its_datasets(checkout, cache, yacht, table, server):
    write_text_files(server[0], table)
    assert data.fetch("yacht") == [checkout / YACHT]
    assert not cache.exists()
    assert sorted(path.name for path in checkout.rglob("*") if path.is_file()) == ["README.md", "yacht.npz"]


def test_what_is_elsewhere_is_not_downloaded_again(monkeypatch, checkout, cache, yacht, table, tmp_path):
    in_cache = write_npz(cache, table)
    assert data.fetch("yacht") == [in_cache]
    in_checkout = write_npz(checkout, table)
    assert data.fetch("yacht") == [in_checkout]
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "mine"))
    in_folder = write_npz(tmp_path / "mine", table)
    assert data.fetch("yacht") == [in_folder]


def test_a_folder_named_datasets_alone_is_no_checkout(checkout, cache):
    assert files.download_folder() == checkout
    (checkout.parent / "pyproject.toml").unlink()
    assert files.download_folder() == cache


def test_a_user_without_a_home_loads_what_is_here_and_is_told_where_downloads_could_go(cache, yacht, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}["no account"])
    assert "moons" in data.names(available=True)
    assert "yacht" not in data.names(available=True)
    with pytest.raises(FileNotFoundError, match="set XDG_CACHE_HOME to a folder"):
        data.load("yacht")


def test_this_repository_is_one_and_git_ignores_what_is_in_it():
    if shutil.which("git") is None or not (ROOT / ".git").exists() or not Path(files.__file__).is_relative_to(ROOT):
        pytest.skip("no git repository, or the package is not imported from it")
    assert files.checkout_folder() == ROOT / "datasets"
    ignored = ["git", "-C", str(ROOT), "check-ignore", "-q"]
    assert subprocess.run([*ignored, "datasets/mnist/x.gz"], check=False).returncode == 0
    assert subprocess.run([*ignored, "datasets/README.md"], check=False).returncode == 1


# ---- downloads
def test_what_was_downloaded_is_readable_as_other_files_are(cache, images):
    path = data.fetch("mnist")[0]
    plain = cache / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["mnist"]
    assert len(list((cache / "mnist").iterdir())) == 4


def test_a_failed_download_is_tried_again(monkeypatch, cache, yacht, table, server):
    write_text_files(server[0], table)
    failed = []

    def get(self):
        if len(failed) < 3 and self.path not in failed:
            failed.append(self.path)
            self.send_error(503)
        else:
            http.server.SimpleHTTPRequestHandler.do_GET(self)

    monkeypatch.setattr(Quiet, "do_GET", get, raising=False)
    assert data.fetch("yacht") == [cache / YACHT]
    assert len(failed) == 3


def test_what_a_server_says_it_has_packed_stays_as_it_is_stored(monkeypatch, cache, images):
    def header(self):
        if self.path.endswith(".gz") and "gzip" in self.headers.get("Accept-Encoding", ""):
            self.send_header("Content-Encoding", "gzip")
        http.server.SimpleHTTPRequestHandler.end_headers(self)

    monkeypatch.setattr(Quiet, "end_headers", header, raising=False)
    assert len(data.fetch("mnist")) == 4


def test_without_pooch_the_extra_is_named_and_nothing_else_needs_it(monkeypatch, cache, yacht, table, tmp_path):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r"pooch.*risk-workbench\[lab\]"):
        data.fetch("yacht")
    assert not cache.exists()
    path = write_npz(tmp_path / "mine", table)
    monkeypatch.setenv("WORKBENCH_DATA", str(tmp_path / "mine"))
    assert data.fetch("yacht") == [path]
    assert len(data.load("yacht").train) == 8


@pytest.mark.slow
def test_pooch_is_imported_for_downloads_only():
    code = "import sys; from workbench import data; data.load('cubic'); print({'pooch', 'requests'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- the registry
def test_a_data_set_is_one_entry(monkeypatch, cache, table, server):
    write_text_files(server[0], table)
    card = {"description": "ten ships", "source": "here", "licence": "CC0", "citation": "none"}
    entry = {
        "kind": "uci",
        "files": {"mine/ships.npz": digest(table)},
        "addresses": [server[1]],
        "splits": 20,
        "features": [[f"x{i}", "m"] for i in range(6)],
        "target": ["speed", "m/s"],
        "card": card,
    }
    monkeypatch.setitem(entries(), "ten-ships", entry)
    monkeypatch.setattr(usage, "_names", set())  # which remembers the names of what was loaded
    d = data.load("Ten_Ships", split=19)
    np.testing.assert_array_equal(d.test.y.numpy()[:, 0], table["y"][table["test_idx"][19]].astype(np.float32))
    assert (str(d.target), d.card.licence) == ("speed (m/s)", "CC0")
    assert "ten-ships" in data.names(available=True)
    assert len(data.checksum("ten-ships")) == 64
    with pytest.raises(ValueError, match="takes split=0 to 19"):
        data.load("ten-ships", split=20)


def test_the_registry_says_what_its_entries_hold():
    from workbench.data import registry

    for name, entry in entries().items():
        assert [key for key in entry if f"`{key}`" not in registry.__doc__] == [], name


def test_files_that_unpack_to_more_than_any_data_set_are_not_unpacked(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1_000_000)
    # claims to be empty
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\0\0\x08\1" + bytes(100_000_000))[:-4] + bytes(4))
    np.savez_compressed(tmp_path / "a.npz", X=np.zeros(1_000_000))
    monkeypatch.setattr(np, "load", lambda path: pytest.fail("it was unpacked"))
    for name in ("a.gz", "a.npz"):
        content, said = files._content(tmp_path / name, name)
        assert content is None
        assert "more than 1,000,000 bytes unpacked" in said


# ---- other names, other places
def test_what_is_offered_unpacked_or_under_another_name_is_packed_here(monkeypatch, cache, server):
    folder, address = server
    raw = b"date,a,b,c,d,e,f,OT\n" + b"".join(b"2016-07-01,%d,0,0,0,0,0,%d\n" % (i, i) for i in range(14400))
    (folder / "deep").mkdir()
    (folder / "deep" / "hours.csv").write_bytes(raw)
    entry = entries()["ett-h1"]
    monkeypatch.setitem(entry, "files", {"ett/ETTh1.csv.gz": hashlib.sha256(raw).hexdigest()})
    for addresses, there in (([address], "deep/hours.csv"), (["http://127.0.0.1:1/"], f"{address}deep/hours.csv")):
        monkeypatch.setitem(entry, "addresses", addresses)
        monkeypatch.setitem(entry, "remote", {"ett/ETTh1.csv.gz": there})
        assert data.fetch("ett-h1") == [cache / "ett" / "ETTh1.csv.gz"]
        assert gzip.decompress((cache / "ett" / "ETTh1.csv.gz").read_bytes()) == raw
        assert data.load("ett-h1", horizon=1).test.y[0].tolist() == [11520.0]
        (cache / "ett" / "ETTh1.csv.gz").unlink()


def test_what_nobody_offers_is_said_before_anything_is_downloaded(cache):
    with pytest.raises(
        FileNotFoundError, match=r"human-train-labels\.npz, which data set 'cifar10n' needs.*no address"
    ):
        data.fetch("cifar10n")
    assert not cache.exists()


def test_sizes_in_the_registry_are_those_of_the_files():
    for name, entry in entries().items():
        assert len(entry.get("bytes", ())) == (len(entry["files"]) if entry.get("addresses") else 0), name
        for file, size in zip(entry.get("files", ()), entry.get("bytes", ()), strict=False):
            if (path := files.locate(file)) is not None:  # packed again elsewhere it may differ a little
                assert path.stat().st_size == pytest.approx(size, rel=0.1), file
