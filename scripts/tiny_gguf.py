#!/usr/bin/env python3
"""Makes tiny GGUF models with random f32 weights and odd shapes, for tests of the attention paths.

The text that these models write is noise, but the same noise in every run: weights come from a fixed seed,
so a run with the cache compressed can be compared, logit by logit, with one without. Query and key weights
are scaled up, so that attention is peaked as in a trained model and a lost token shows.

Tokens are bytes, characters and a few letter pairs. Every model has a context of 4096 or more.
Needs the `gguf` package; without it the script runs itself again in a virtual environment of the cache folder.
"""

import argparse
import dataclasses
import os
import pathlib
import string
import subprocess
import sys

GGUF_VERSION = "0.19.0"


def reexec_with_gguf():
    """Runs this script again under the python of the environment that scripts/common.sh makes."""
    if os.environ.get("QEVICT_TINY_GGUF_ENV"):
        raise SystemExit("tiny_gguf.py: the Python environment lacks the gguf package; delete it and try again")
    common = pathlib.Path(__file__).resolve().parent / "common.sh"
    command = ["bash", "-c", f'set -euo pipefail; . "$0"; python_env gguf gguf=={GGUF_VERSION}', str(common)]
    python = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    os.environ["QEVICT_TINY_GGUF_ENV"] = "1"
    os.execv(python, [python, *sys.argv])


try:
    import gguf
    import numpy as np
except ImportError:
    reexec_with_gguf()


@dataclasses.dataclass(frozen=True)
class Shape:
    arch: str
    note: str
    build: str  # name of the function that writes the tensors of a layer
    head_dim: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    n_layers: int = 2
    n_embd: int = 64  # architectures without key_length need n_heads * head_dim
    n_ff: int = 64
    context: int = 8192
    head_dim_v: int = 0  # 0: as head_dim
    n_rot: int = 0  # 0: as head_dim
    extra: tuple = ()  # (key, value) pairs under the architecture's prefix
    options: frozenset = frozenset()

    @property
    def v_dim(self):
        return self.head_dim_v or self.head_dim


def llama(head_dim, n_heads, n_kv_heads, note, **more):
    return Shape("llama", note, "gated", head_dim, n_heads, n_kv_heads, **more)


SHAPES = {
    "llama-hd64": llama(64, 9, 3, "3 query heads per KV head, RoPE over neighbours"),
    "llama-hd64-mqa": llama(64, 8, 1, "one KV head"),
    "llama-hd80": llama(80, 2, 2, "no grouped heads"),
    "llama-hd96": llama(96, 4, 1, "4 query heads per KV head"),
    "llama-hd112": llama(112, 4, 2, "2 query heads per KV head"),
    "llama-hd128": llama(128, 4, 1, "4 query heads per KV head"),
    "llama-hd128-mha": llama(128, 3, 3, "no grouped heads"),
    "llama-hd256": llama(256, 2, 1, "2 query heads per KV head"),
    "llama-ropefreqs": llama(64, 4, 2, "RoPE with frequency factors (Llama 3)",
                             options=frozenset({"rope_freqs"})),
    "llama-yarn": llama(64, 4, 2, "RoPE with YaRN scaling",
                        extra=(("rope.scaling.type", "yarn"), ("rope.scaling.factor", 4.0),
                               ("rope.scaling.original_context_length", 2048))),
    "qwen2-hd64": Shape("qwen2", "key bias with outlier channels, 5 query heads per KV head", "gated",
                        64, 5, 1, n_embd=320, options=frozenset({"qkv_bias"})),
    "qwen3-hd128": Shape("qwen3", "norm over each key head", "gated", 128, 4, 2,
                         options=frozenset({"qk_norm"})),
    "gemma2-hd256": Shape("gemma2", "softcap, every second layer sees 512 tokens", "gated", 256, 2, 1,
                          options=frozenset({"post_norms"}),
                          extra=(("attention.sliding_window", 512),
                                 ("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))),
    "gemma3-hd64": Shape("gemma3", "norm over each key head, 3 of 4 layers see 512 tokens", "gated", 64, 4, 1,
                         n_layers=4, options=frozenset({"post_norms", "qk_norm"}),
                         extra=(("attention.sliding_window", 512),
                                ("attention.sliding_window_pattern", [True, True, True, False]))),
    "gpt-oss-hd64": Shape("gpt-oss", "attention sinks, every second layer sees 128 tokens, experts", "experts",
                          64, 8, 1, extra=(("attention.sliding_window", 128), ("expert_count", 2),
                                           ("expert_used_count", 1), ("expert_feed_forward_length", 64)),
                          options=frozenset({"qkv_bias"})),
    "mimo2-k96-v64": Shape("mimo2", "keys of 96 and values of 64 channels, sinks", "gated", 96, 4, 2,
                           head_dim_v=64, n_rot=32, options=frozenset({"sinks"}),
                           extra=(("attention.sliding_window", 128), ("expert_feed_forward_length", 64),
                                  ("attention.sliding_window_pattern", [False, True]))),
    "phi2-hd80": Shape("phi2", "RoPE over 32 of 80 channels, no grouped heads", "phi2", 80, 2, 2,
                       n_embd=160, n_rot=32),
    "gpt2-hd64": Shape("gpt2", "no RoPE, learned positions, fused QKV", "fused", 64, 2, 2, n_embd=128, context=4096,
                       options=frozenset({"pos_embd", "bias"})),
    "smollm3-hd64": Shape("smollm3", "every 4th layer without RoPE", "gated", 64, 4, 2, n_layers=4),
    "bloom-hd64": Shape("bloom", "ALiBi, fused QKV", "fused", 64, 2, 2, n_embd=128,
                        options=frozenset({"bias", "embd_norm"})),
    "mpt-hd64": Shape("mpt", "ALiBi, clamped QKV", "fused", 64, 2, 1, n_embd=128,
                      extra=(("attention.clamp_kqv", 6.0), ("attention.max_alibi_bias", 8.0))),
    "qwen2vl-hd128": Shape("qwen2vl", "M-RoPE, key bias", "gated", 128, 2, 1, n_embd=256,
                           extra=(("rope.dimension_sections", [16, 24, 24, 0]),),
                           options=frozenset({"qkv_bias"})),
    "mamba": Shape("mamba", "recurrent, no attention (to be refused)", "mamba", 64, 0, 0,
                   extra=(("ssm.conv_kernel", 4), ("ssm.inner_size", 128), ("ssm.state_size", 16),
                          ("ssm.time_step_rank", 8))),
    "lfm2-hd64": Shape("lfm2", "recurrent and attention layers mixed (to be refused)", "lfm2", 64, 2, 1,
                       n_embd=128, n_layers=2, extra=(("shortconv.l_cache", 3),), options=frozenset({"qk_norm"})),
    "deepseek2-mla": Shape("deepseek2", "multi-head latent attention (to be refused)", "mla", 192, 2, 1,
                           head_dim_v=128, n_rot=64,
                           extra=(("leading_dense_block_count", 2), ("attention.q_lora_rank", 32),
                                  ("attention.kv_lora_rank", 128), ("attention.key_length_mla", 96),
                                  ("attention.value_length_mla", 64), ("expert_count", 2),
                                  ("expert_used_count", 1), ("expert_feed_forward_length", 64),
                                  ("expert_shared_count", 1))),
}


def vocabulary():
    """Tokens, scores and types of a SentencePiece vocabulary: specials, bytes, characters, letter pairs."""
    normal, unknown, control, byte = (int(t) for t in (
        gguf.TokenType.NORMAL, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.BYTE))
    tokens = [("<unk>", 0.0, unknown), ("<s>", 0.0, control), ("</s>", 0.0, control)]
    tokens += [(f"<0x{b:02X}>", 0.0, byte) for b in range(256)]
    pairs = ["th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "\u2581t", "\u2581a", "\u2581s", "\u2581w"]
    tokens += [(text, -1.0 - i, normal) for i, text in enumerate(pairs)]
    characters = ["\u2581", *string.ascii_letters, *string.digits, *string.punctuation]
    tokens += [(text, -100.0 - i, normal) for i, text in enumerate(characters)]
    return tokens


class TensorWriter:
    """Adds random tensors to a GGUF file; shapes are [outputs, inputs], as numpy stores them."""

    def __init__(self, out, seed):
        self.out = out
        self.rng = np.random.default_rng(seed)

    def add(self, name, array):
        self.out.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))

    def matrix(self, name, *shape, gain=1.0):
        scale = gain / np.sqrt(shape[-1])
        self.add(f"{name}.weight", self.rng.standard_normal(shape) * scale)

    def norm(self, name, size, bias=False, gain=1.0):
        self.add(f"{name}.weight", gain * (1.0 + 0.1 * self.rng.standard_normal(size)))
        if bias:
            self.bias(name, size)

    def bias(self, name, *shape, std=0.1):
        self.add(f"{name}.bias", std * self.rng.standard_normal(shape))

    def outlier_bias(self, name, size):
        """A key bias as trained models have it: a few channels far from zero."""
        values = 0.5 * self.rng.standard_normal(size)
        values[:: max(1, size // 6)] += 8.0
        self.add(f"{name}.bias", values)


QK_GAIN = 1.6  # scores q.k / sqrt(head_dim) then have a deviation of about 2.6
OUTPUT_GAIN = 2.0  # attention weighs as much as the residual stream, so that its errors reach the logits


def attention(t, s, blk):
    t.matrix(f"{blk}.attn_q", s.n_heads * s.head_dim, s.n_embd, gain=QK_GAIN)
    t.matrix(f"{blk}.attn_k", s.n_kv_heads * s.head_dim, s.n_embd, gain=QK_GAIN)
    t.matrix(f"{blk}.attn_v", s.n_kv_heads * s.v_dim, s.n_embd)
    if "qkv_bias" in s.options:
        t.bias(f"{blk}.attn_q", s.n_heads * s.head_dim)
        t.outlier_bias(f"{blk}.attn_k", s.n_kv_heads * s.head_dim)
        t.bias(f"{blk}.attn_v", s.n_kv_heads * s.v_dim)
    if "qk_norm" in s.options:
        t.norm(f"{blk}.attn_q_norm", s.head_dim)
        t.norm(f"{blk}.attn_k_norm", s.head_dim)
    if "sinks" in s.options:
        t.add(f"{blk}.attn_sinks.weight", t.rng.standard_normal(s.n_heads))
    t.matrix(f"{blk}.attn_output", s.n_embd, s.n_heads * s.v_dim, gain=OUTPUT_GAIN)


def gated_ffn(t, s, blk):
    t.norm(f"{blk}.ffn_norm", s.n_embd)
    t.matrix(f"{blk}.ffn_gate", s.n_ff, s.n_embd)
    t.matrix(f"{blk}.ffn_up", s.n_ff, s.n_embd)
    t.matrix(f"{blk}.ffn_down", s.n_embd, s.n_ff)


def layer_gated(t, s, blk, _index):
    t.norm(f"{blk}.attn_norm", s.n_embd)
    attention(t, s, blk)
    gated_ffn(t, s, blk)
    if "post_norms" in s.options:
        t.norm(f"{blk}.post_attention_norm", s.n_embd, gain=4.0)  # else the embedding outweighs the layers
        t.norm(f"{blk}.post_ffw_norm", s.n_embd, gain=4.0)


def layer_experts(t, s, blk, _index):
    extra = dict(s.extra)
    n_expert, n_ff = extra["expert_count"], extra["expert_feed_forward_length"]
    t.norm(f"{blk}.attn_norm", s.n_embd)
    t.norm(f"{blk}.post_attention_norm", s.n_embd)
    attention(t, s, blk)
    t.bias(f"{blk}.attn_output", s.n_embd)
    t.add(f"{blk}.attn_sinks.weight", t.rng.standard_normal(s.n_heads))
    t.matrix(f"{blk}.ffn_gate_inp", n_expert, s.n_embd)
    t.bias(f"{blk}.ffn_gate_inp", n_expert)
    for part, rows, columns in (("gate", n_ff, s.n_embd), ("up", n_ff, s.n_embd), ("down", s.n_embd, n_ff)):
        t.matrix(f"{blk}.ffn_{part}_exps", n_expert, rows, columns)
        t.bias(f"{blk}.ffn_{part}_exps", n_expert, rows)


def plain_ffn(t, s, blk, bias):
    t.matrix(f"{blk}.ffn_up", s.n_ff, s.n_embd)
    t.matrix(f"{blk}.ffn_down", s.n_embd, s.n_ff)
    if bias:
        t.bias(f"{blk}.ffn_up", s.n_ff)
        t.bias(f"{blk}.ffn_down", s.n_embd)


def layer_phi2(t, s, blk, _index):
    t.norm(f"{blk}.attn_norm", s.n_embd, bias=True)
    attention(t, s, blk)
    t.bias(f"{blk}.attn_output", s.n_embd)
    plain_ffn(t, s, blk, bias=True)


def layer_fused(t, s, blk, _index):
    bias = "bias" in s.options
    t.norm(f"{blk}.attn_norm", s.n_embd, bias)
    qk = (s.n_heads + s.n_kv_heads) * s.head_dim
    v = s.n_kv_heads * s.v_dim
    rows = t.rng.standard_normal((qk + v, s.n_embd)) / np.sqrt(s.n_embd)
    rows[:qk] *= QK_GAIN
    t.add(f"{blk}.attn_qkv.weight", rows)
    t.matrix(f"{blk}.attn_output", s.n_embd, s.n_embd, gain=OUTPUT_GAIN)
    t.norm(f"{blk}.ffn_norm", s.n_embd, bias)
    if bias:
        t.bias(f"{blk}.attn_qkv", qk + v)
        t.bias(f"{blk}.attn_output", s.n_embd)
    plain_ffn(t, s, blk, bias)


def layer_mamba(t, s, blk, _index):
    extra = dict(s.extra)
    inner, state, rank = extra["ssm.inner_size"], extra["ssm.state_size"], extra["ssm.time_step_rank"]
    t.norm(f"{blk}.attn_norm", s.n_embd)
    t.matrix(f"{blk}.ssm_in", 2 * inner, s.n_embd)
    t.matrix(f"{blk}.ssm_conv1d", inner, extra["ssm.conv_kernel"])
    t.bias(f"{blk}.ssm_conv1d", inner)
    t.matrix(f"{blk}.ssm_x", rank + 2 * state, inner)
    t.matrix(f"{blk}.ssm_dt", inner, rank)
    t.bias(f"{blk}.ssm_dt", inner)
    t.add(f"{blk}.ssm_a", -np.tile(np.arange(1.0, state + 1), (inner, 1)))
    t.add(f"{blk}.ssm_d", np.ones(inner))
    t.matrix(f"{blk}.ssm_out", s.n_embd, inner)


def lfm2_is_attention(index):
    return index % 2 == 1


def layer_lfm2(t, s, blk, index):
    t.norm(f"{blk}.attn_norm", s.n_embd)
    if lfm2_is_attention(index):
        attention(t, s, blk)
    else:
        t.matrix(f"{blk}.shortconv.conv", s.n_embd, dict(s.extra)["shortconv.l_cache"])
        t.matrix(f"{blk}.shortconv.in_proj", 3 * s.n_embd, s.n_embd)
        t.matrix(f"{blk}.shortconv.out_proj", s.n_embd, s.n_embd)
    gated_ffn(t, s, blk)


def layer_mla(t, s, blk, _index):
    extra = dict(s.extra)
    q_rank, kv_rank = extra["attention.q_lora_rank"], extra["attention.kv_lora_rank"]
    k_dim, v_dim = extra["attention.key_length_mla"], extra["attention.value_length_mla"]
    t.norm(f"{blk}.attn_norm", s.n_embd)
    t.norm(f"{blk}.attn_q_a_norm", q_rank)
    t.norm(f"{blk}.attn_kv_a_norm", kv_rank)
    t.matrix(f"{blk}.attn_q_a", q_rank, s.n_embd)
    t.matrix(f"{blk}.attn_q_b", s.n_heads * k_dim, q_rank)
    t.matrix(f"{blk}.attn_kv_a_mqa", kv_rank + s.n_rot, s.n_embd)
    t.matrix(f"{blk}.attn_k_b", s.n_heads, kv_rank, k_dim - s.n_rot)
    t.matrix(f"{blk}.attn_v_b", s.n_heads, v_dim, kv_rank)
    t.matrix(f"{blk}.attn_output", s.n_embd, s.n_heads * v_dim)
    gated_ffn(t, s, blk)


LAYERS = {"gated": layer_gated, "experts": layer_experts, "phi2": layer_phi2, "fused": layer_fused,
          "mamba": layer_mamba, "lfm2": layer_lfm2, "mla": layer_mla}
LAYER_NORM_ARCHS = {"phi2", "gpt2", "bloom", "mpt"}


def add_value(out, key, value):
    if isinstance(value, str):
        out.add_string(key, value)
    elif isinstance(value, float):
        out.add_float32(key, value)
    elif isinstance(value, list):
        out.add_array(key, value)
    else:
        out.add_uint32(key, value)


def write_metadata(out, name, s):
    prefix = s.arch
    out.add_name(f"tiny {name}")
    out.add_file_type(int(gguf.LlamaFileType.ALL_F32))
    values = {"context_length": s.context, "embedding_length": s.n_embd, "block_count": s.n_layers,
              "feed_forward_length": s.n_ff}
    epsilon = "layer_norm_epsilon" if s.arch in LAYER_NORM_ARCHS else "layer_norm_rms_epsilon"
    values[f"attention.{epsilon}"] = 1e-5
    if s.n_heads:
        values |= {"attention.head_count": s.n_heads, "attention.head_count_kv": s.n_kv_heads,
                   "attention.key_length": s.head_dim, "attention.value_length": s.v_dim,
                   "rope.dimension_count": s.n_rot or s.head_dim, "rope.freq_base": 10000.0}
    if s.arch == "lfm2":
        values["attention.head_count_kv"] = [
            s.n_kv_heads if lfm2_is_attention(i) else 0 for i in range(s.n_layers)]
    values |= dict(s.extra)
    for key, value in values.items():
        add_value(out, f"{prefix}.{key}", value)


def write_vocabulary(out):
    tokens = vocabulary()
    out.add_tokenizer_model("llama")
    out.add_token_list([text for text, _, _ in tokens])
    out.add_token_scores([score for _, score, _ in tokens])
    out.add_token_types([kind for _, _, kind in tokens])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)
    out.add_add_bos_token(True)
    return len(tokens)


def write_model(name, path, seed):
    s = SHAPES[name]
    out = gguf.GGUFWriter(path, s.arch)
    write_metadata(out, name, s)
    n_vocab = write_vocabulary(out)

    t = TensorWriter(out, [seed, list(SHAPES).index(name)])
    layer_norm = s.arch in LAYER_NORM_ARCHS
    # The residual stream starts with unit variance (Gemma multiplies by sqrt(n_embd)); an output matrix of
    # its own keeps the logits apart from the input.
    scale = 1.0 / np.sqrt(s.n_embd) if s.arch.startswith("gemma") else 1.0
    t.add("token_embd.weight", scale * t.rng.standard_normal((n_vocab, s.n_embd)))
    if "pos_embd" in s.options:
        t.add("position_embd.weight", 0.3 * t.rng.standard_normal((s.context, s.n_embd)))
    if "embd_norm" in s.options:
        t.norm("token_embd_norm", s.n_embd, bias=True)
    t.norm("token_embd_norm" if s.arch == "lfm2" else "output_norm", s.n_embd,
           bias=layer_norm and s.arch != "mpt")
    if s.arch != "gemma2":  # its output is always the embedding
        t.matrix("output", n_vocab, s.n_embd, gain=3.0)
    if s.arch == "phi2":
        t.bias("output", n_vocab)
    if "rope_freqs" in s.options:
        t.add("rope_freqs.weight", np.geomspace(1.0, 8.0, s.head_dim // 2))
    for index in range(s.n_layers):
        LAYERS[s.build](t, s, f"blk.{index}", index)

    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    cache = os.environ.get("QEVICT_CACHE_DIR") or pathlib.Path.home() / ".cache" / "qevict"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="models to make; none or `all` makes every one")
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path(cache) / "tiny", help="folder of the models")
    parser.add_argument("--list", action="store_true", help="list the names, one a line, with what each is for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--force", action="store_true", help="write again what is there already")
    args = parser.parse_args()
    if args.list:
        for name, s in SHAPES.items():
            print(f"{name:18} {s.note}")
        return 0
    names = list(SHAPES) if args.names in ([], ["all"]) else args.names
    if unknown := [name for name in names if name not in SHAPES]:
        print(f"tiny_gguf.py: no model {unknown[0]!r}; --list shows the names", file=sys.stderr)
        return 1
    args.dir.mkdir(parents=True, exist_ok=True)
    written = os.stat(__file__).st_mtime  # a model older than this script is made again
    for name in names:
        path = args.dir / f"{name}.gguf"
        if args.force or not path.is_file() or path.stat().st_mtime < written:
            partial = path.with_suffix(f".{os.getpid()}.partial")
            write_model(name, partial, args.seed)
            partial.replace(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
