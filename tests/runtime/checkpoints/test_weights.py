"""Weights in one process: the names of modules, files, what is refused, and how boxes are sent."""

import itertools
import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import ztrans as zt
from tests.support.lifted import Net, batch, lifted
from tests.support.live_bytes import LiveBytes
from tests.support.llama_weights import shapes
from ztrans.runtime.whole_leaves import Box, Leaf, Ranks, _rounds, _sender, whole_leaves


@pytest.fixture
def mesh():
    return zt.make_mesh("cpu", dp=1)


def trained(mesh):
    """A model whose weights are in a state, the state after a step, and the model's weights then."""
    model, _optimizer, plain, state = lifted()
    step = zt.shard_params(mesh)(plain)
    state, _ = step(step.shard(state), batch(0))
    reference, reference_optimizer, *_ = lifted()
    zt.write_back(reference, reference_optimizer, step.unshard(state))
    return model, step, state, reference.state_dict()


def test_state_dict_has_the_names_of_the_module_and_the_leaves_of_the_state(mesh):
    """The module's weights are in the state: tied, buffers, and one buffer that is not saved."""
    model, _, state, wanted = trained(mesh)
    weights = zt.state_dict(model, state)
    assert list(weights) == list(wanted) and "scale" not in weights
    assert weights["first.weight"] is state["params"]["first.weight"] is weights["second.weight"]
    assert weights["norm.running_mean"] is state["buffers"]["norm.running_mean"]
    whole = zt.state_dict(model, state, to=0)
    assert list(whole) == list(wanted)
    assert all(torch.equal(whole[name], wanted[name]) for name in wanted)
    assert type(whole["first.weight"]) is torch.Tensor


def test_an_export_is_read_by_safetensors_with_tied_weights_once(mesh, tmp_path):
    model, _, state, wanted = trained(mesh)
    written = zt.export(tmp_path / "out", zt.state_dict(model, state))
    read = load_file(written / "model.safetensors")
    assert {*wanted} - {*read} == {"second.weight"}
    assert all(
        torch.equal(x, wanted[name]) and x.dtype == wanted[name].dtype for name, x in read.items()
    )
    net = Net()
    load_model(net, written / "model.safetensors")  # it ties by the metadata of the file
    assert all(torch.equal(x, wanted[name]) for name, x in net.state_dict().items())


def test_an_export_is_loaded_into_the_state_of_another_run(mesh, tmp_path):
    model, _step, state, wanted = trained(mesh)
    zt.export(tmp_path / "out", zt.state_dict(model, state), max_file_bytes=100)
    with torch.device("meta"):
        blank = Net()
    optimizer = torch.optim.AdamW(blank.parameters())
    loop = lambda x: None
    _, meta = zt.lift(loop, blank, optimizer)
    new = zt.shard_params(mesh)(zt.lift(loop, blank, optimizer)[0]).shard(meta)
    moments = pytree.tree_map(lambda x: x.clone(), new["optimizer"])
    weights = zt.state_dict(blank, new)
    assert zt.load_weights(weights, tmp_path / "out") is weights
    assert all(torch.equal(x.full_tensor(), wanted[name]) for name, x in weights.items())
    same = pytree.tree_map(lambda a, b: torch.equal(a, b), moments, new["optimizer"])
    assert all(pytree.tree_leaves(same)), "moments stay"


def test_values_are_converted_to_the_dtypes_of_the_weights(tmp_path):
    save_file(
        {"w": torch.tensor([1.5, 2.0], dtype=torch.bfloat16), "n": torch.tensor(3)},
        tmp_path / "x.safetensors",
    )
    weights = {"w": torch.zeros(2, dtype=torch.float64), "n": torch.zeros((), dtype=torch.int64)}
    zt.load_weights(weights, tmp_path)
    assert weights["w"].tolist() == [1.5, 2.0] and weights["n"] == 3


def test_transformers_reads_an_export_and_its_own_files_are_loaded(mesh, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(vocab_size=60, tie_word_embeddings=True, **sizes)
    model = transformers.LlamaForCausalLM(config)
    wanted = {name: x.clone() for name, x in model.state_dict().items()}
    plain, state = zt.lift(lambda ids: model(input_ids=ids, labels=ids).loss, model)
    step = zt.shard_params(mesh)(plain)
    weights = zt.state_dict(model, step.shard(state))
    zt.export(tmp_path / "out", weights, max_file_bytes=3000)
    config.save_pretrained(tmp_path / "out")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(x, wanted[name]) for name, x in read.state_dict().items())
    read.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    for x in weights.values():
        x.detach().zero_()
    zt.load_weights(weights, tmp_path / "theirs")
    assert all(torch.equal(x.full_tensor(), wanted[name]) for name, x in weights.items())


def test_files_have_at_most_a_size_and_the_largest_leaves_first(tmp_path):
    sizes = {"a": 10, "b": 300, "c": 100, "d": 90, "e": 20}
    weights = {name: torch.randn(n) for name, n in sizes.items()}
    weights["steps"] = torch.tensor(7)
    weights["mask"] = torch.tensor([True, False, True])
    written = zt.export(tmp_path / "out", weights, max_file_bytes=800)
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in weights.values())
    files = sorted(written.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    read = [load_file(file) for file in files]
    assert [sorted(x) for x in read] == [["b"], ["c", "d"], ["a", "e", "mask", "steps"]]
    for file, tensors in zip(files, read):
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert all(torch.equal(x, weights[name]) for name, x in tensors.items())


def test_an_export_replaces_an_export_and_keeps_other_files(tmp_path):
    out = tmp_path / "out"
    zt.export(out, {"w": torch.zeros(300), "v": torch.zeros(300)}, max_file_bytes=1300)
    (out / "config.json").write_text("{}")
    zt.export(out, {"w": torch.ones(3)})
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "ztrans.json",
    ]
    assert load_file(out / "model.safetensors")["w"].tolist() == [1.0] * 3
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    (out / "logs").mkdir()
    with pytest.raises(
        FileExistsError, match="has folders that are not part of an export of weights, such as logs"
    ):
        zt.export(out, {"w": torch.ones(3)})
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_an_export_does_not_replace_a_checkpoint_nor_a_save_an_export(tmp_path):
    zt.save(tmp_path / "a", {"w": torch.ones(2)}).result()
    with pytest.raises(FileExistsError, match="exists and is not an export of weights"):
        zt.export(tmp_path / "a", {"w": torch.ones(2)})
    zt.export(tmp_path / "b", {"w": torch.ones(2)})
    with pytest.raises(RuntimeError, match="exists and is not a checkpoint"):
        zt.save(tmp_path / "b", {"w": torch.ones(2)}).result()


WEIGHTS = {"up.weight": torch.ones(2, 3), "down.weight": torch.ones(3, 2)}
WRONG = {
    "a missing name": (
        {**WEIGHTS, "gate.weight": torch.ones(2)},
        "does not have gate.weight.",
    ),
    "a name that is nearly right": (
        {"up.weight": torch.ones(2, 3), "down.weigth": torch.ones(3, 2)},
        "does not have down.weigth. The nearest name in it is down.weight.\n",
    ),
    "an extra name": (
        {"up.weight": torch.ones(2, 3)},
        "has down.weight, which the weights do not have. The nearest name of a weight is up.weight.\n",
    ),
    "a shape": (
        {**WEIGHTS, "up.weight": torch.ones(3, 2)},
        "up.weight has shape [2, 3] in",
    ),
    "a dtype": (
        {**WEIGHTS, "up.weight": torch.ones(2, 3, dtype=torch.int32)},
        "up.weight is torch.float32 in",
    ),
    "meta": (
        {**WEIGHTS, "up.weight": torch.ones(2, 3, device="meta")},
        "up.weight is on meta, and has no values.\nShard the state first",
    ),
}  # fmt: skip


@pytest.mark.parametrize("weights, text", WRONG.values(), ids=WRONG)
def test_weights_that_do_not_fit_the_files_are_refused(tmp_path, weights, text):
    zt.export(tmp_path / "out", WEIGHTS)
    with pytest.raises(ValueError) as error:
        zt.load_weights(weights, tmp_path / "out")
    assert str(error.value).startswith("load_weights: ") and text in str(error.value)


def test_without_strict_only_names_in_common_are_read(tmp_path):
    zt.export(tmp_path / "out", WEIGHTS)
    weights = {"up.weight": torch.zeros(2, 3), "adapter": torch.zeros(2)}
    zt.load_weights(weights, tmp_path / "out", strict=False)
    assert weights["up.weight"].all() and not weights["adapter"].any()


def test_files_that_are_missing_or_damaged_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="has no safetensors files"):
        zt.load_weights(WEIGHTS, tmp_path)
    out = zt.export(tmp_path / "out", WEIGHTS, max_file_bytes=24)
    (out / "model-00001-of-00002.safetensors").write_bytes(b"\x08" + bytes(7) + b"nonsense")
    with pytest.raises(ValueError, match=r"00001-of-00002.safetensors cannot be read: .*header"):
        zt.load_weights(WEIGHTS, out)
    (out / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"which model.safetensors.index.json names, is missing"
    ):
        zt.load_weights(WEIGHTS, out)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="load_weights: safetensors is not installed"):
        zt.load_weights(WEIGHTS, out)


def test_what_is_not_weights_is_refused(mesh, tmp_path):
    model, _, state, _ = trained(mesh)
    with pytest.raises(
        ValueError, match=r"export: the state has buffers(.|\n)*zt.state_dict\(model, state\)"
    ):
        zt.export(tmp_path / "out", state)
    with pytest.raises(TypeError, match=r"export: lr is 0.1, and weights are tensors"):
        zt.export(tmp_path / "out", {"w": torch.ones(1), "lr": 0.1})
    with pytest.raises(
        ValueError, match=r"export: .* has the name of a file(.|\n)*Name a folder: zt.export\('/"
    ):
        zt.export(tmp_path / "model.safetensors", state["params"])
    with pytest.raises(TypeError, match=r"dtype=torch.int8 is not a dtype of floats"):
        zt.export(tmp_path / "out", state["params"], dtype=torch.int8)
    with pytest.raises(TypeError, match=r"w is torch.complex128, which safetensors does not have"):
        zt.export(tmp_path / "out", {"w": torch.ones(1, dtype=torch.complex128)})
    with pytest.raises(ValueError, match="to=3 is not a rank of the mesh"):
        zt.stream_weights(state["params"], to=3)
    with pytest.raises(ValueError, match=r"state_dict: the state has no norm.running_mean"):
        zt.state_dict(model, {"params": state["params"]})
    with pytest.raises(TypeError, match="state_dict: pass the module and the state"):
        zt.state_dict(state, model)
    with pytest.raises(ValueError, match="state_dict: the state has no parameter 'weight'"):
        zt.state_dict(nn.Linear(1, 1), state)
    part, whole = nn.Linear(1, 1), nn.ModuleDict({"actor": nn.Linear(1, 1)})
    with pytest.raises(
        ValueError, match=r"'weight', and the module has; the nearest is 'actor.weight'"
    ):
        zt.state_dict(part, {"params": dict(whole.named_parameters())})
    for call in (lambda: zt.export("out", part), lambda: zt.load_weights(part, "out")):
        with pytest.raises(
            TypeError, match=r"^(export|load_weights): this is a Linear, and weights"
        ):
            call()
    with pytest.raises(TypeError, match=r"^save: the state is Linear"):
        zt.save("out", part)
    assert not list(tmp_path.iterdir())


def test_a_step_in_the_middle_of_a_stream_is_an_error(mesh):
    model, step, state, _ = trained(mesh)
    stream = zt.stream_weights(zt.state_dict(model, state), bucket_bytes=1)
    next(stream)
    step(state, batch(1))
    with pytest.raises(RuntimeError, match="has changed since the iterator was made"):
        next(stream)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.data())
def test_every_receiver_gets_every_box_and_each_box_crosses_to_a_host_once(hosts, data):
    ranks = list(range(len(hosts)))
    some_ranks = st.lists(st.sampled_from(ranks), min_size=1, unique=True)
    receivers = data.draw(some_ranks)
    boxes = [Box((i,), (1,)) for i in range(3)]
    holders = {box: data.draw(some_ranks) for box in boxes}
    held = {box: {*holders[box]} for box in boxes}
    crossings = []
    for turn in _rounds(holders, receivers, hosts):
        arrived = []
        for box, have, to in turn:
            assert {*have} <= held[box]
            for rank in {*to} - {*have}:
                sender = _sender(have, rank, hosts)
                assert sender in held[box], "it was there before this round"
                arrived.append((box, rank))
                if hosts[sender] != hosts[rank]:
                    crossings.append((box, hosts[rank]))
        for box, rank in arrived:
            assert rank not in held[box]
            held[box].add(rank)
    assert all({*receivers} <= held[box] for box in boxes)
    assert len(crossings) == len(set(crossings))


class Silent:
    """A channel on which nothing arrives."""

    is_gloo = True

    def __init__(self):
        self.tags = itertools.count()

    def send_and_receive(self, sends, receives):
        return []


@pytest.mark.slow
def test_a_rank_holds_one_leaf_of_llama_8b_beside_its_shards():
    """Counted in fake tensors: 2.1 GB for the largest leaf, where the model has 32 GB and the rank 4 GB of it."""
    size, rank = 8, 3
    with FakeTensorMode():
        leaves = []
        for name, shape in shapes().items():
            rows = -(-shape[0] // size)
            boxes = {}
            for r in range(size):
                count = max(0, min(rows, shape[0] - r * rows))
                boxes[Box((r * rows, *[0] * (len(shape) - 1)), (count, *shape[1:]))] = [r]
            part = torch.empty(rows, *shape[1:])
            leaves.append(Leaf(name, part, shape, torch.float32, boxes))
        leaves.sort(key=lambda leaf: -leaf.nbytes)
        receivers = [[i % size] for i in range(len(leaves))]
        largest = leaves[0].nbytes
        with LiveBytes(leaf.part for leaf in leaves) as memory:
            ranks = Ranks(rank, ["a"] * size, Silent())
            for _, whole in whole_leaves(leaves, receivers, ranks, largest):
                del whole
        assert 0.4 * largest < memory.peak <= largest
    assert largest == 128256 * 4096 * 4
