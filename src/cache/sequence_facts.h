// SequenceFacts: counters and phase of a sequence, apart from what it holds.
#pragma once

#include <cstdint>

namespace qevict {

/// Plain facts of a sequence: what a copy of it shares.
struct SequenceFacts {
  uint64_t appended = 0;  // tokens counted for sinks
  uint64_t live = 0;      // tokens in windows, not dead
  uint64_t evicted = 0;   // tokens evicted in every layer, not dead
  uint64_t decode_steps = 0;
  uint64_t activity = 0;  // time of the last step
  int32_t tail_pos = 0;
  uint32_t reserved = 0;      // tokens promised by the last Route and not appended yet
  uint32_t chunk_tokens = 0;  // longest prompt chunk so far
  uint32_t last_rows = 0;     // of the last step
  uint32_t open_rows = 0;     // of the step before, of which any but the first may be taken back
  uint64_t round = 0;         // decode round that counted it last
  uint64_t chunk_round = 0;   // decode round of its last prompt chunk
  bool had_tokens = false;
  bool noted = false;           // a step has been noted
  bool tail_confirmed = false;  // see KvCache::ConfirmTail
  bool prompt_phase = true;
  bool decoded = false;      // a decode step has been noted
  bool first_event = false;  // all layers have been routed once
  bool event_step = false;   // the step in progress is an event
  bool chain = true;         // every token was appended behind the one before it

  bool empty() const { return live + evicted == 0; }
};

}  // namespace qevict
