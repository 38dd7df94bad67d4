#include "ggml/lineage.h"

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace qevict::plugin {

CacheName ParseCacheName(const char* name) {
  constexpr const char* kPrefix = "cache_";
  CacheName result;
  if (std::strncmp(name, kPrefix, 6) != 0) return result;
  const char* tail = std::strrchr(name, '_');  // "..k_l12": the layer follows the last underscore
  if (!tail || tail[1] != 'l' || !std::isdigit(static_cast<unsigned char>(tail[2])) ||
      tail - name < 7)
    return result;
  result.kind = tail[-1];
  result.layer = std::atoi(tail + 2);
  return result;
}

const ggml_tensor* FindRope(const ggml_tensor* rows) {
  const ggml_tensor* t = rows;
  for (int depth = 0; t && depth < 16; ++depth) {
    switch (t->op) {
      case GGML_OP_ROPE:
        return t;
      case GGML_OP_VIEW:
        // A view of a part (fused QKV) still has the rotation of the whole, but a view of another
        // token does not occur.
        t = t->src[0] ? t->src[0] : t->view_src;
        break;
      case GGML_OP_RESHAPE:
      case GGML_OP_CONT:
        t = t->src[0];
        break;
      default:
        return nullptr;
    }
  }
  return nullptr;
}

const ggml_tensor* FindRopeBehind(const ggml_tensor* rows) {
  const ggml_tensor* t = rows;
  for (int depth = 0; t && depth < 32; ++depth) {
    if (const ggml_tensor* rope = FindRope(t)) return rope;
    switch (t->op) {
      case GGML_OP_VIEW:
        t = t->src[0] ? t->src[0] : t->view_src;
        break;
      case GGML_OP_RESHAPE:
      case GGML_OP_CONT:
      case GGML_OP_NORM:
      case GGML_OP_RMS_NORM:
      case GGML_OP_L2_NORM:
      case GGML_OP_SCALE:
      case GGML_OP_CLAMP:
      case GGML_OP_ADD:
      case GGML_OP_MUL:
        t = t->src[0];
        break;
      default:
        return nullptr;
    }
  }
  return nullptr;
}

namespace {

float ParamF32(const ggml_tensor* t, int i) {
  float f;
  std::memcpy(&f, t->op_params + i, sizeof(f));
  return f;
}

// Interleaved M-RoPE leaves pairs that belong to no section at the fourth position, which is 0 for
// text: an infinite frequency divisor says "never rotated" (ggml-cpu/ops.cpp, M-RoPE cache).
void MarkUnrotatedPairs(const ggml_tensor* rope, RopeParams& params) {
  int32_t sections[4];
  std::memcpy(sections, rope->op_params + 11, sizeof(sections));
  const int total = sections[0] + sections[1] + sections[2] + sections[3];
  if (total <= 0) return;
  const uint32_t n_pairs = params.n_dims / 2;
  if (params.freq_factors.empty()) params.freq_factors.assign(n_pairs, 1.0f);
  const bool interleaved = rope->op_params[2] == GGML_ROPE_TYPE_IMROPE;
  for (uint32_t i = 0; i < n_pairs; ++i) {
    const int sector = static_cast<int>(i) % total;
    const bool rotated = interleaved ? sector < 3 * sections[(sector % 3 == 0)   ? 0
                                                             : (sector % 3 == 1) ? 1
                                                                                 : 2]
                                     : sector < sections[0] + sections[1] + sections[2];
    if (!rotated) params.freq_factors[i] = std::numeric_limits<float>::infinity();
  }
}

}  // namespace

RopeParams ReadRope(const ggml_tensor* rope) {
  RopeParams params;
  const int mode = rope->op_params[2];
  switch (mode) {
    case GGML_ROPE_TYPE_NORMAL:
      params.pairing = RopePairing::kInterleaved;
      break;
    case GGML_ROPE_TYPE_NEOX:
    case GGML_ROPE_TYPE_MROPE:
    case GGML_ROPE_TYPE_IMROPE:
      params.pairing = RopePairing::kHalves;
      break;
    default:
      return params;
  }
  params.n_dims = static_cast<uint32_t>(rope->op_params[1]);
  params.offset = static_cast<uint32_t>(rope->op_params[15]);
  params.n_ctx_orig = static_cast<uint32_t>(rope->op_params[4]);
  params.freq_base = ParamF32(rope, 5);
  params.freq_scale = ParamF32(rope, 6);
  params.ext_factor = ParamF32(rope, 7);
  params.attn_factor = ParamF32(rope, 8);
  params.beta_fast = ParamF32(rope, 9);
  params.beta_slow = ParamF32(rope, 10);
  if (const ggml_tensor* factors = rope->src[2]) {
    const float* f = static_cast<const float*>(factors->data);
    if (f) params.freq_factors.assign(f, f + params.n_dims / 2);
  }
  if (mode == GGML_ROPE_TYPE_MROPE || mode == GGML_ROPE_TYPE_IMROPE)
    MarkUnrotatedPairs(rope, params);
  return params;
}

void ReadPositions(const ggml_tensor* rope, size_t n, std::vector<int32_t>& pos,
                   std::vector<uint8_t>& positional) {
  const int32_t* p = static_cast<const int32_t*>(rope->src[1]->data);
  const bool multi = (rope->op_params[2] & GGML_ROPE_TYPE_MROPE) != 0;
  pos.assign(p, p + n);
  positional.assign(n, 1);
  if (!multi) return;
  for (size_t i = 0; i < n; ++i) {
    // Text tokens carry one position three times and 0 as the fourth.
    positional[i] =
        p[i] == p[i + n] && p[i] == p[i + 2 * n] && (p[i + 3 * n] == 0 || p[i + 3 * n] == p[i]);
  }
}

}  // namespace qevict::plugin
