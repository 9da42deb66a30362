"""transformers' own Trainer on a CaptModel."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from capt import CaptConfig, CaptModel, get_capt_model
from capt.training import SaveAdapter
from capt.training.trainer import CaptTrainer

from .naive import SMALL, make_base

TASKS = ("SEQ_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM")


def base_for(task, dtype=torch.float32):
    if task == "SEQ_CLS":
        torch.manual_seed(0)
        return LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3)).to(dtype)
    return make_base("llama" if task == "CAUSAL_LM" else "t5", dtype)


def rows_for(task, count):
    draw = torch.Generator().manual_seed(count)
    rows = []
    for i in range(count):
        ids = torch.randint(2, 61, (6,), generator=draw)
        mask = (torch.arange(6) < 3 + i % 4).long()
        labels = {
            "SEQ_CLS": i % 3,
            "CAUSAL_LM": torch.where((torch.arange(6) > 1) & (mask == 1), ids, -100),
            "SEQ_2_SEQ_LM": ids[:3],
        }
        # "row" is no argument of the model: the Trainer has to find that out and drop it.
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels[task], "row": f"row {i}"})
    return rows


def trainer_of(folder, task, dtype=torch.float32, callbacks=(), **options):
    torch.manual_seed(0)
    model = get_capt_model(base_for(task, dtype), CaptConfig(task_type=task))
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 0.3, "logging_steps": 1} | options,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return Trainer(
        model, arguments, train_dataset=rows_for(task, 16), eval_dataset=rows_for(task, 7), callbacks=[*callbacks]
    )


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def log(trainer):
    clock = ("runtime", "per_second", "flos", "train_loss")
    return [{k: v for k, v in e.items() if not any(w in k for w in clock)} for e in trainer.state.log_history]


class Interrupt(TrainerCallback):
    """Ctrl-C in the midst of a run."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


SAVING = {
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
}


@pytest.mark.parametrize("task", TASKS)
def test_best_checkpoint_and_resumption(tmp_path, task):
    whole = trainer_of(tmp_path / "whole", task, **SAVING)
    before = {name: tensor.clone() for name, tensor in whole.model.base.state_dict().items()}
    whole.train()
    for name, tensor in whole.model.base.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    losses = {e["step"]: e["eval_loss"] for e in whole.state.log_history if "eval_loss" in e}
    assert len(losses) == 4
    assert whole.evaluate()["eval_loss"] == min(losses.values())
    best = load_file(tmp_path / f"whole/checkpoint-{min(losses, key=losses.get)}/model.safetensors")
    assert best.keys() == whole.model.state_dict().keys()
    assert all(torch.equal(best[name], tensor) for name, tensor in whole.model.state_dict().items())

    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path / "run", task, callbacks=[Interrupt()], **SAVING).train()
    resumed = trainer_of(tmp_path / "run", task, **SAVING)
    resumed.train(resume_from_checkpoint=True)
    whole.state.log_history.pop()  # of the evaluation above
    assert log(resumed) == log(whole)
    assert all(torch.equal(tensor, resumed.model.state_dict()[name]) for name, tensor in state(whole.model).items())


@pytest.mark.parametrize("task", TASKS)
def test_a_checkpoint_is_an_adapter(tmp_path, task):
    trainer = trainer_of(tmp_path, task, callbacks=[SaveAdapter()], max_steps=2, save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    head = {"head.weight"} if task == "SEQ_CLS" else set()
    assert load_file(folder / "adapter_model.safetensors").keys() == {"capsules.vectors"} | head
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == task
    # What the Trainer writes itself holds the same, and not one weight of the base.
    kept = load_file(folder / "model.safetensors")
    assert kept.keys() == {f"adapters.default.{name}" for name in {"capsules.vectors"} | head}
    again = CaptModel.from_pretrained(base_for(task), folder).eval()
    batch = {k: torch.stack([row[k] for row in rows_for(task, 3)]) for k in ("input_ids", "attention_mask")}
    if task == "SEQ_2_SEQ_LM":
        batch["decoder_input_ids"] = batch["input_ids"][:, :2]
    assert torch.equal(again(**batch).logits, trainer.model.eval()(**batch).logits)


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_and_prediction_find_labels_and_logits(tmp_path, task):
    trainer = trainer_of(tmp_path, task, per_device_eval_batch_size=3)
    assert trainer.label_names == ["labels"]
    found = trainer.predict(rows_for(task, 7))
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    assert logits.shape == {"SEQ_CLS": (7, 3), "CAUSAL_LM": (7, 6, 61), "SEQ_2_SEQ_LM": (7, 3, 61)}[task]
    assert found.label_ids.shape[0] == 7
    assert found.metrics["test_loss"] > 0


@pytest.mark.parametrize("task", TASKS)
def test_bf16(tmp_path, task):
    """A bf16 base and autocast, whose vectors and their gradients stay fp32."""
    trainer = trainer_of(tmp_path, task, torch.bfloat16, bf16=True, max_steps=2, learning_rate=1e-3)
    dtypes = set()
    vectors = trainer.model.adapters["default"].capsules.vectors
    vectors.register_post_accumulate_grad_hook(lambda p: dtypes.add(p.grad.dtype))
    torch.nn.init.ones_(vectors)
    trainer.train()
    assert dtypes == {torch.float32} == {p.dtype for p in trainer.model.adapters.parameters()}
    assert 0 < (vectors - 1).abs().max() < 4e-3


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("task", TASKS)
def test_gradient_checkpointing(tmp_path, task):
    states = []
    for on in (False, True):
        trainer = trainer_of(tmp_path, task, gradient_checkpointing=on, max_steps=2, save_strategy="no")
        trainer.train()
        states.append(state(trainer.model))
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-5, atol=1e-6)


def test_generated_texts_as_predictions(tmp_path):
    model = get_capt_model(base_for("SEQ_2_SEQ_LM"), CaptConfig())
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), predict_with_generate=True, generation_max_length=5, report_to="none", use_cpu=True
    )
    rows = [
        {name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in rows_for("SEQ_2_SEQ_LM", 4)
    ]
    found = Seq2SeqTrainer(model, arguments).predict(rows)
    batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "attention_mask")}
    want = model.eval().generate(**batch, max_length=5)
    assert found.predictions[:, : want.shape[1]].tolist() == want.tolist()
    assert found.metrics["test_loss"] > 0


def test_several_gpus_in_one_process_are_refused(config, tokenizer, tmp_path):
    """The Trainer would wrap the model in torch.nn.DataParallel."""
    model = get_capt_model(base_for("SEQ_CLS"), CaptConfig())
    with pytest.raises(NotImplementedError, match="start one process a GPU, with torchrun or accelerate launch"):
        model._replicate_for_data_parallel()
    assert CaptTrainer(model, tokenizer, config, tmp_path, rows_for("SEQ_CLS", 4)).args.n_gpu == 1


def test_state_holds_no_base_and_asks_for_none():
    model = get_capt_model(base_for("CAUSAL_LM"), CaptConfig(variant="projection"))
    outer = torch.nn.ModuleDict({"inner": model})
    kept = state(model)
    assert kept.keys() == {f"adapters.default.capsules.{name}" for name in ("vectors", "down", "up")}
    assert state(outer).keys() == {f"inner.{name}" for name in kept}
    changed = {name: tensor + 1 for name, tensor in kept.items()}
    model.load_state_dict(changed)
    assert all(torch.equal(tensor, changed[name]) for name, tensor in model.state_dict().items())
    outer.load_state_dict({f"inner.{name}": tensor for name, tensor in kept.items()})
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    # What is given of the base is still loaded, and what else is missing still missed.
    zeros = torch.zeros_like(model.base.lm_head.weight)
    model.load_state_dict(kept | {"base.lm_head.weight": zeros})
    assert torch.equal(model.base.lm_head.weight, zeros)
    del kept["adapters.default.capsules.up"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "adapters.default.capsules.up"'):
        model.load_state_dict(kept)
