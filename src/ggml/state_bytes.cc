// State bytes of a CacheGroup: what tensor get and set mean for tensors whose contents are virtual.

#include <algorithm>
#include <cstring>

#include "ggml/cache_group.h"
#include "ggml/guard.h"

namespace qevict::plugin {

void CacheGroup::ReadBytes(const ggml_tensor* tensor, size_t offset, size_t size, uint8_t* out) {
  if (!EnsureCache().ok()) {
    std::memset(out, 0, size);
    return;
  }
  const LayerBinding& layer = layers_[static_cast<size_t>(FindLayer(tensor))];
  const bool is_k = layer.k == tensor;
  const size_t row_bytes = tensor->nb[1];
  std::vector<uint16_t> row(row_bytes / 2);
  for (size_t done = 0; done < size;) {
    const size_t index = (offset + done) / row_bytes, begin = (offset + done) % row_bytes;
    const auto stream = static_cast<uint32_t>(index / n_cells_),
               cell = static_cast<uint32_t>(index % n_cells_);
    for (uint32_t part = 0; part < layer.n_parts; ++part) {
      uint16_t* columns = row.data() + part * (row.size() / layer.n_parts);
      if (is_k) {
        cache_->ReadRowK(layer.first_cache_layer + part, stream, cell, columns);
      } else {
        cache_->ReadRowV(layer.first_cache_layer + part, stream, cell, columns);
      }
    }
    const size_t n = std::min(row_bytes - begin, size - done);
    std::memcpy(out + done, reinterpret_cast<const uint8_t*>(row.data()) + begin, n);
    done += n;
  }
}

Status CacheGroup::WriteBytes(const ggml_tensor* tensor, size_t offset, size_t size,
                              const uint8_t* data) {
  QEVICT_RETURN_IF_ERROR(EnsureCache());
  const size_t row_bytes = tensor->nb[1];
  const LayerBinding& layer = layers_[static_cast<size_t>(FindLayer(tensor))];
  const bool is_k = layer.k == tensor;
  // Slices may cut rows: the bytes of an unfinished row wait for the slice that continues it.
  std::vector<uint8_t> joined;
  const auto waiting = std::find_if(partial_rows_.begin(), partial_rows_.end(),
                                    [&](const PartialRow& p) { return p.root == tensor; });
  if (waiting != partial_rows_.end()) {
    if (waiting->row_begin + waiting->bytes.size() == offset) {
      joined = std::move(waiting->bytes);
      joined.insert(joined.end(), data, data + size);
      offset = waiting->row_begin;
      data = joined.data();
      size = joined.size();
    }
    partial_rows_.erase(waiting);
  }
  if (offset % row_bytes) {  // the head of this row never came: nothing can be made of it
    const size_t skip = std::min(size, row_bytes - offset % row_bytes);
    offset += skip;
    data += skip;
    size -= skip;
  }
  const size_t rows = size / row_bytes;
  if (size % row_bytes)
    partial_rows_.push_back(
        {tensor, offset + rows * row_bytes, {data + rows * row_bytes, data + size}});
  std::vector<uint16_t> aligned(rows * row_bytes / 2);
  std::memcpy(aligned.data(), data, rows * row_bytes);
  Status first_error;
  for (size_t done = 0; done < rows;) {
    const size_t index = offset / row_bytes + done;
    const auto stream = static_cast<uint32_t>(index / n_cells_),
               cell = static_cast<uint32_t>(index % n_cells_);
    const auto n = static_cast<uint32_t>(std::min<size_t>(rows - done, n_cells_ - cell));
    const uint16_t* block = aligned.data() + done * row_bytes / 2;
    const Status status = Guarded([&] { return RestoreRows(layer, is_k, stream, cell, n, block); });
    if (!status.ok() && first_error.ok()) first_error = status;
    if (status.code() == StatusCode::kResourceExhausted) lost_[stream] = status.message();
    highest_cell_[stream] = std::max(highest_cell_[stream], cell + n);
    done += n;
  }
  step_open_ = false;
  return first_error;
}

Status CacheGroup::RestoreRows(const LayerBinding& layer, bool is_k, uint32_t stream, uint32_t cell,
                               uint32_t n, const uint16_t* rows) {
  const size_t width = static_cast<size_t>((is_k ? layer.k : layer.v)->ne[0]),
               part_width = width / layer.n_parts;
  std::vector<uint16_t> columns(layer.n_parts > 1 ? n * part_width : 0);
  Status first_error;
  for (uint32_t part = 0; part < layer.n_parts; ++part) {
    for (size_t i = 0; i < columns.size() / part_width; ++i) {
      std::memcpy(columns.data() + i * part_width, rows + i * width + part * part_width,
                  part_width * sizeof(uint16_t));
    }
    const uint16_t* from = columns.empty() ? rows : columns.data();
    const uint32_t cache_layer = layer.first_cache_layer + part;
    const Status status = is_k ? cache_->RestoreRowsK(cache_layer, stream, cell, n, from)
                               : cache_->RestoreRowsV(cache_layer, stream, cell, n, from);
    if (!status.ok() && first_error.ok()) first_error = status;
  }
  return first_error;
}

void CacheGroup::ZeroBytes(const ggml_tensor* tensor, size_t offset, size_t size) {
  if (!cache_) return;
  const size_t row_bytes = tensor->nb[1];
  const size_t begin = (offset + row_bytes - 1) / row_bytes, end = (offset + size) / row_bytes;
  for (size_t i = begin; i < end; ++i)
    cache_->Kill(static_cast<uint32_t>(i / n_cells_), static_cast<uint32_t>(i % n_cells_));
}

}  // namespace qevict::plugin
