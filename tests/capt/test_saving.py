"""Adapters on disk: what is written, what comes back, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from capt import CaptConfig, CaptModel, get_capt_model

from .naive import SMALL, make_base, randomise


def saved(tmp_path, base=None, **fields):
    model = get_capt_model(base or make_base("llama", torch.float32), CaptConfig(**fields))
    randomise(model)
    model.save_pretrained(tmp_path)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fields", [{}, {"variant": "extraction", "length": 2, "depth": [0, 3]}, {"variant": "projection", "lead": 1}]
)
def test_round_trip_into_a_fresh_base(tmp_path, fields, dtype):
    model = saved(tmp_path, make_base("llama", dtype), **fields)
    again = CaptModel.from_pretrained(make_base("llama", dtype), tmp_path)
    assert again.capt_config == model.capt_config
    for name, p in model.adapters["default"].state_dict().items():
        assert torch.equal(again.adapters["default"].state_dict()[name], p)
        assert p.dtype == torch.float32
    ids = torch.randint(2, 61, (2, 5))
    assert torch.equal(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert not any(p.requires_grad for p in again.parameters())
    trainable = CaptModel.from_pretrained(make_base("llama", dtype), tmp_path, is_trainable=True)
    assert trainable.get_nb_trainable_parameters() == model.get_nb_trainable_parameters()


def test_the_files(tmp_path):
    base = LlamaModel(LlamaConfig(**SMALL, num_labels=3))
    saved(tmp_path, base, task_type="SEQ_CLS")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert {k: tuple(v.shape) for k, v in load_file(tmp_path / "adapter_model.safetensors").items()} == {
        "capsules.vectors": (4, 1, 16),
        "head.weight": (3, 16),
    }
    fields = json.loads((tmp_path / "adapter_config.json").read_text())
    assert fields["peft_type"] == "CAPT"
    assert fields["base_model_type"] == "llama"
    assert fields["task_type"] == "SEQ_CLS"
    again = CaptModel.from_pretrained(base, tmp_path)
    assert torch.equal(
        again.adapters["default"].head.weight, load_file(tmp_path / "adapter_model.safetensors")["head.weight"]
    )


def test_a_file_without_the_head(tmp_path):
    base = LlamaModel(LlamaConfig(**SMALL, num_labels=3))
    saved(tmp_path, base, task_type="SEQ_CLS")
    path = tmp_path / "adapter_model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k != "head.weight"}, path)
    with pytest.raises(ValueError, match=r"holds no head\.weight"):
        CaptModel.from_pretrained(base, tmp_path)
    save_file({**load_file(path), "head.weight": torch.zeros(3, 16), "extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="holds an unknown extra"):
        CaptModel.from_pretrained(base, tmp_path)
    save_file({k: v for k, v in load_file(path).items() if k != "extra"}, path)
    with pytest.raises(ValueError, match=r"head\.weight in .* shape \(3, 16\), the base wants \(2, 16\)"):
        CaptModel.from_pretrained(LlamaModel(LlamaConfig(**SMALL)), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "made for base_num_layers 4, the base has 3"),
        ({"hidden_size": 32}, "made for base_hidden_size 16, the base has 32"),
    ],
)
def test_bases_of_another_shape(tmp_path, change, message):
    saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        CaptModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**SMALL | change)), tmp_path)


def test_t5_into_llama(tmp_path):
    saved(tmp_path, make_base("t5"))
    with pytest.raises(ValueError, match="made for base_model_type 't5', the base has 'llama'"):
        CaptModel.from_pretrained(make_base("llama"), tmp_path)


def test_files_that_are_corrupt_or_missing(tmp_path):
    saved(tmp_path)
    base = make_base("llama")
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    good_config, good_weights = config.read_text(), weights.read_bytes()
    for cut in (0, 5, len(good_weights) // 2, len(good_weights) - 1):
        weights.write_bytes(good_weights[:cut])
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors is corrupt or truncated"):
            CaptModel.from_pretrained(base, tmp_path)
    weights.write_bytes(good_weights)
    for text, message in (
        (good_config[:20], "is not JSON"),
        ("[]", "does not describe a CaPT adapter"),
        (good_config.replace("CAPT", "LORA"), "does not describe a CaPT adapter"),
        (good_config.replace('"length": 1', '"length": 0'), "length must be an int of at least 1, got 0"),
        (good_config.replace('"length"', '"lenght"'), "has no field lenght"),
        (
            good_config.replace('"length": 1', '"length": 2'),
            r"vectors in .* shape \(4, 1, 16\), the base wants \(4, 2, 16\)",
        ),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            CaptModel.from_pretrained(base, tmp_path)
    config.unlink()
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json$"):
        CaptModel.from_pretrained(base, tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"holds no adapter_config\.json; a Trainer's save_model writes no adapter"):
        CaptModel.from_pretrained(base, tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        CaptModel.from_pretrained(base, tmp_path / "nowhere")


def test_a_hub_that_is_out_of_reach(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="nobody/nothing is neither a folder nor a hub repository"):
        CaptModel.from_pretrained(make_base("llama"), "nobody/nothing")


def test_an_interrupted_write_leaves_the_old_adapter(tmp_path, monkeypatch):
    model = saved(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    randomise(model)
    monkeypatch.setattr("capt.saving.json.dumps", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_loading_a_second_adapter(tmp_path):
    first = saved(tmp_path)
    model = get_capt_model(make_base("llama", torch.float32), CaptConfig())
    model.load_adapter(tmp_path, "second")
    assert model.active_adapter == "default"
    model.set_adapter("second")
    ids = torch.randint(2, 61, (2, 5))
    assert torch.equal(model.eval()(input_ids=ids).logits, first.eval()(input_ids=ids).logits)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="corrupt"):
        model.load_adapter(tmp_path, "third")
    assert list(model.adapters) == ["default", "second"]


def test_an_adapter_from_the_hub(tmp_path, monkeypatch):
    """By its id, both files and nothing else of the repository."""
    model, asked = saved(tmp_path), []

    def snapshot_download(repository, allow_patterns):
        asked.append((repository, sorted(allow_patterns)))
        return str(tmp_path)

    monkeypatch.setattr("capt.saving.snapshot_download", snapshot_download)
    again = CaptModel.from_pretrained(make_base("llama", torch.float32), "someone/an-adapter")
    assert asked == [("someone/an-adapter", ["adapter_config.json", "adapter_model.safetensors"])]
    kept = model.adapters["default"].capsules.vectors
    assert torch.equal(again.adapters["default"].capsules.vectors, kept)
