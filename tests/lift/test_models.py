"""Models of transformers, timm, diffusers and peft are lifted as they are, and train as in the untouched loop.

These are 24 of the builds of `benchmarks/models`. Those of a library that is not installed are skipped; the extra
`models` has all of them.
"""

import importlib

import pytest

from benchmarks.models.compare import outcome
from tests.support.cover import parameters_of

MODELS = {
    "transformers": [
        "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel",
        "FalconForCausalLM", "MambaForCausalLM", "BertForMaskedLM", "DebertaV2ForMaskedLM", "T5ForConditionalGeneration",
        "BartForConditionalGeneration", "ViTForImageClassification", "SwinForImageClassification", "CLIPModel",
        "WhisperForConditionalGeneration", "VitsModel",
    ],
    "timm": ["vit_tiny_patch16_224", "resnet10t", "ConvNeXt"],
    "diffusers": ["UNet2DConditionModel", "PixArtTransformer2DModel"],
    "peft": ["LoRA", "DoRA", "IA3"],
}  # fmt: skip
BUILDS = [(library, name) for library, names in MODELS.items() for name in names]
# One of each kind: a decoder, experts, a scan, relative positions, an encoder with a decoder, windows of an image,
# convolutions over time and over images, diffusion, adapters.
TESTED = {
    *("LlamaForCausalLM", "MixtralForCausalLM", "MambaForCausalLM", "DebertaV2ForMaskedLM"),
    *(
        "T5ForConditionalGeneration",
        "SwinForImageClassification",
        "WhisperForConditionalGeneration",
    ),
    *("ConvNeXt", "PixArtTransformer2DModel", "LoRA"),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("library", "name"),
    parameters_of(BUILDS, [(library, name) for library, name in BUILDS if name in TESTED]),
    ids=[name for _, name in BUILDS],
)
def test_a_model_trains_as_in_the_untouched_loop(library, name):
    """Every second one on two ranks at stage 3, the others on three ranks at stage 2.

    AdamW is fused, as one equation is traced faster than a dozen for each parameter. The benchmark has them.
    """
    pytest.importorskip(library, exc_type=ImportError)
    pytest.importorskip("transformers")
    builds = importlib.import_module(f"benchmarks.models.{library}_builds").builds()
    (build,) = (build for build in builds if build.name == name)
    is_even = BUILDS.index((library, name)) % 2 == 0
    result = outcome(build, *(((2,), (3,)) if is_even else ((3,), (2,))), fused=True)
    assert result.kind == "equal", result.detail
