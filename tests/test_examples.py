"""The examples: `main` of each at a small size, and the examples for several ranks on two."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ztrans as zt
from tests.support.processes import run_ranks, start_ranks

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Imports an example by name. If the example creates a process group, it is destroyed after the test."""
    before = dist.is_initialized()
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    if dist.is_initialized() and not before:
        dist.destroy_process_group()


def on_two_ranks(script: str, *args: str) -> str:
    """The output of the first of two ranks that run an example as torchrun would."""
    ranks = [rank.end(240) for rank in start_ranks(2, EXAMPLES / script, *args)]
    assert not any(rank.code for rank in ranks), "\n".join(rank.errors for rank in ranks)
    return ranks[0].output


def printed(text: str) -> dict[int, float]:
    """The losses that an example prints, by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) +loss (\S+)", text)}


def test_the_mlp_example_learns(example, capsys):
    losses = example("mlp").main(steps=30, batch=64)
    assert losses[-1] < losses[0] / 2
    assert printed(capsys.readouterr().out).keys() == {0, 20, 29}


@pytest.mark.slow
def test_the_diloco_example_learns(example, capsys):
    losses = example("diloco").main(steps=100, h=10, parts=2, width=32)
    assert losses[-1] < losses[0] / 2
    assert printed(capsys.readouterr().out).keys() == {19, 39, 59, 79, 99}


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_the_gpt_example_learns(example, bf16):
    gpt = example("gpt")
    losses = gpt.main(
        gpt.Config(layers=1, width=32, heads=2, sequence=16), steps=25, batch=8, lr=1e-2, bf16=bf16
    )
    assert losses[-1] < losses[0] - 1


def test_lookahead_of_the_example_is_that_of_a_loop(example):
    module = example("transforms")
    batch = torch.randn(12, 16), torch.randn(12, 8)
    slices = list(zip(*(x.chunk(2) for x in batch)))
    step = zt.chain(zt.shard_params(zt.AbstractMesh(dp=2)), module.Lookahead(k=2))(
        module.train_step
    )
    state = step.init(module.first_state())
    lowered = step.lower(state, *slices[0])
    loop = module.first_state()
    slow = loop["params"]
    for i in range(5):
        state, _ = lowered.lockstep(state, slices)
        loop, _ = module.train_step(loop, *batch)
        if i % 2:
            slow = {k: p + 0.5 * (loop["params"][k] - p) for k, p in slow.items()}
            loop = {**loop, "params": slow}
    torch.testing.assert_close(state.state, loop)
    torch.testing.assert_close(state.kept["lookahead"]["params.up"], slow["up"])


@pytest.mark.slow
def test_the_transforms_of_the_example_obey_the_laws(example):
    norms = example("transforms").main()
    assert list(norms) == [f"norm of params.{name}" for name in ("up", "middle", "down")]
    assert all(norm > 0 for norm in norms.values())


@pytest.mark.slow
def test_the_inspection_example_prints_every_stage(example, capsys):
    config = example("gpt").Config(layers=1, width=32, heads=2, sequence=16)
    example("inspect_a_step").main(config, ranks=4)
    out = capsys.readouterr().out
    for name in ("shard_params", "overlap_grads", "prefetch", "fuse_cast_gather", "lower"):
        assert f"---- {name}\n" in out
    assert re.search(
        r"\+  params.blocks.0.mlp.0.weight.full': bf16\[128,32\]! +# .*\n\+    = all_gather\(\[params",
        out,
    )
    assert "wire dp param" in out
    assert re.findall(r"stage (\d)   state +[\d,]+   peak +[\d,]+ ", out) == ["0", "1", "2", "3"]


class TinyLM(nn.Module):
    """A module that is called as the language models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.table(input_ids)))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.mT.float(), labels))


@pytest.mark.slow
def test_the_planning_example_says_whether_a_model_fits_and_what_to_change(example, capsys):
    planning = example("your_model")
    with torch.device("meta"):
        model = TinyLM()
    planning.main(model, 16, batch=2, sequence=128)
    out = capsys.readouterr().out
    assert out.startswith("train_step on 16 ranks, H100\n") and "4,096 a step" in out
    for row in ("step ", "tokens ", "MFU ", "peak memory ", "all_gather over dp: "):
        assert f"\n{row}" in out
    parameters = sum(p.numel() for p in model.parameters())
    assert planning.fits(model, 4).memory_analysis().state >= 3 * parameters * 4 // 4

    small = dataclasses.replace(zt.cluster("h100").device, memory=1 << 22, reserve=0.0)
    planning.main(model, 2, batch=4, sequence=4096, device=small)
    assert "is less than the step needs in any order tried" in (out := capsys.readouterr().out)
    assert "zt.accumulate(" in out


def test_the_page_shows_the_function_of_the_planning_example():
    """The page adds comments for its readers, which the file has too."""
    page = (ROOT / "docs/your-model-on-n-gpus.md").read_text()
    source = (EXAMPLES / "your_model.py").read_text()
    for name in ("fits", "on_meta"):
        (function,) = re.findall(rf"^def {name}\(.*?(?=\n\n\n)", source, re.M | re.S)
        assert function in page


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_planning_example_takes_a_model_of_transformers_on_meta(example, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    transformers.LlamaConfig(vocab_size=256, **sizes).save_pretrained(tmp_path)
    planning = example("your_model")
    model = planning.on_meta(str(tmp_path))
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float32)}
    planning.main(model, 8, sequence=128)
    assert "1,024 a step" in capsys.readouterr().out


@pytest.mark.distributed
def test_the_mlp_example_has_equal_losses_on_one_rank_and_on_two(example, capsys):
    example("mlp").main()
    one_rank = printed(capsys.readouterr().out)
    assert printed(on_two_ranks("mlp.py")) == pytest.approx(one_rank, abs=0.02)


@pytest.mark.distributed
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype, near", [("bf16", 0.01), ("fp32", 1e-5)])
def test_the_demo_agrees_with_the_plain_step(tmp_path, dtype, near):
    sizes = {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "sequence": 16,
        "batch": 4,
        "steps": 30,
        "dtype": dtype,
    }
    out = tmp_path / "new" / "demo.png"
    text = on_two_ranks(
        "demo.py", *(f"--{k}={v}" for k, v in sizes.items()), "--lr=0.01", f"--out={out}"
    )
    assert re.findall(rf"{dtype}, plain +step +(\d+)/30", text) == ["10", "20", "30"]
    assert out.read_bytes().startswith(b"\x89PNG")
    gathers = re.findall(r"= all_gather\(.*", text)
    assert gathers and any("bf16, axis=dp" in gather for gather in gathers) == (dtype == "bf16")
    ranks, plain = (
        re.search(rf"{name} +loss (\S+) -> (\S+)", text).groups() for name in ("2 ranks", "plain")
    )
    assert float(ranks[1]) < float(ranks[0]) - 1
    assert float(plain[1]) < float(plain[0]) - 1
    apart = dict(re.findall(r"(\w+): the losses differ by at most (\S+), ", text))
    assert float(apart[dtype]) < near
    assert float(apart["fp32"]) < 1e-5
    param = re.search(r"param .*(0\.\d\d)", text)
    assert float(param[1]) < 0.7, "matrices must be gathered in bf16"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_hf_trainer_example_has_the_losses_of_the_trainer_alone_and_resumes(tmp_path):
    """On two ranks, where the Trainer alone uses DDP. The checkpoints are models that transformers reads."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (report,) = run_ranks(2, "hf_training.py", str(tmp_path))
    assert len(report["plain"]) == 6 and report["plain"][-1] < report["plain"][0]
    assert report["resumed"] == pytest.approx(report["plain"], abs=1e-5)
    assert report["first"] == report["resumed"][:3]
    assert report["apart"] < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_lora_example_trains_adapters_as_the_plain_loop_does(example, tmp_path):
    peft = pytest.importorskip("peft")
    lora, text = example("finetune_lora"), example("text")
    losses = lora.main(steps=8, batch=4, folder=str(tmp_path))
    model, _, loop_step = lora.make_loop()
    frozen = {
        name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad
    }
    plain = [loop_step(text.draw(text.stdlib_bytes(), i, 4, 63)).item() for i in range(8)]
    assert losses == pytest.approx(plain, rel=1e-6)  # the optimizer is not fused
    assert all(p.equal(frozen[name]) for name, p in model.named_parameters() if name in frozen)
    read = peft.PeftModel.from_pretrained(lora.make_base(), tmp_path)
    wanted, own = (peft.get_peft_model_state_dict(each) for each in (model, read))
    assert wanted.keys() == own.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(own[name], x, rtol=1e-5, atol=1e-6)


def test_the_program_in_the_readme_is_from_the_golden_file():
    """Its lines are those of the file, in order. Where lines are left out, the README has `...`."""
    folder = ROOT / "tests/golden/test_fuse_cast_gather"
    golden = (
        (folder / "test_the_program_of_all_four_transforms_prints.txt").read_text().splitlines()
    )
    blocks = (ROOT / "README.md").read_text().split("```")[1::2]
    (shown,) = (block for block in blocks if block.startswith("\n# step "))
    rest = iter(golden)
    for line in shown.strip().splitlines():
        assert line.strip() == "..." or line in rest, (
            f"README shows {line!r}, which the program does not have there"
        )


@pytest.mark.slow
def test_the_rollouts_example_sends_weights_to_a_player_that_learns_to_win(example, capsys):
    wins = example("rollouts").main(steps=40, games=256)
    assert sum(wins[:5]) / 5 < 0.4 and sum(wins[-5:]) / 5 > 0.6
    sent = re.findall(r"step +(\d+) .* weights sent (\d)", capsys.readouterr().out)
    assert sent == [("0", "0"), ("20", "2"), ("39", "2")]  # the first layer is frozen
