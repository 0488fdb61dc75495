// The entry points of the kernels. They assume checked parameters, allocate nothing, and report
// rather than throw.
#pragma once

#include <cstdint>

#include "kernels/decode_plan.h"
#include "kernels/params.h"

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace nvfp4_dsmla {

// Host kernels work on [begin, end) of their rows, so that the caller's thread pool may share them.
namespace cpu {

void write(const WriteParams& params, int64_t begin, int64_t end);
void fused_write(const FusedWriteParams& params, int64_t begin, int64_t end);
void gather(const SlotGatherParams& params, int64_t begin, int64_t end);
void gather(const RequestGatherParams& params, int64_t begin, int64_t end);
void convert(const ConvertParams& params, int64_t begin, int64_t end);
void merge(const MergeParams& params, int64_t begin, int64_t end);

// Decode has two steps. A row's tokens are cut into parts, whose number depends on topk alone:
// decode() attends to the parts [begin, end), combine_decode() makes the outputs of (row, head)
// pairs [begin, end) from them, both counted from first_row. All arrays are float.
struct DecodeParts {
  int64_t first_row;  // of the batch * s_q rows
  int64_t per_row;    // decode_parts_per_row()
  float* out;         // [rows, per_row, heads, 512], not yet divided by sum
  float* max;         // [rows, per_row, heads], of the scores
  float* sum;         // [rows, per_row, heads], of exp(score - max)
};
int64_t decode_parts_per_row(const DecodeParams& params);
int64_t decode_scratch_floats(const DecodeParams& params);  // of each call that runs at a time
void decode(const DecodeParams& params,
            const DecodeParts& parts,
            float* scratch,
            int64_t begin,
            int64_t end);
void combine_decode(const DecodeParams& params,
                    const DecodeParts& parts,
                    int64_t begin,
                    int64_t end);

// The first position in slot_mapping whose slot is at or past the capacity, or -1.
int64_t find_slot_past_capacity(const WriteParams& params);

// The first position, of a token that is written, outside [0, max_positions), or -1.
int64_t find_position_outside(const FusedWriteParams& params);

// What is wrong with a gather by requests, in the order it is looked for.
enum class GatherFault : uint8_t {
  kNone,
  kStartsNotFromZero,  // workspace_starts[0] != 0
  kStartsDecrease,     // workspace_starts[request] < workspace_starts[request - 1]
  kTokenOutsideTable,  // token `value` of `request` lies before or past its row of the block table
  kBlockOutsideCache,  // block_table[request, column] = value is no block of the cache
};
struct GatherFaultAt {
  GatherFault fault = GatherFault::kNone;
  int64_t request = 0;
  int64_t column = 0;
  int64_t value = 0;
};
GatherFaultAt find_gather_fault(const RequestGatherParams& params);

}  // namespace cpu

// Each enqueues its work and returns a cudaError_t, 0 for success. They read no device data on
// the host and never synchronise, so they may be captured in a CUDA graph.
namespace cuda {

int write(const WriteParams& params, CUstream_st* stream);
int fused_write(const FusedWriteParams& params, CUstream_st* stream);
int gather(const SlotGatherParams& params, CUstream_st* stream);
int gather(const RequestGatherParams& params, CUstream_st* stream);
int convert(const ConvertParams& params, CUstream_st* stream);
int merge(const MergeParams& params, CUstream_st* stream);

// How the current device serves a call; kNone if it cannot.
DecodePlan decode_plan(const DecodeParams& params);
// `workspace`: device memory of so many bytes, of which only this call makes use; null if none.
int64_t decode_workspace_bytes(const DecodeParams& params, const DecodePlan& plan);
int decode(const DecodeParams& params,
           const DecodePlan& plan,
           void* workspace,
           CUstream_st* stream);

const char* error_text(int error);
bool is_missing_code(int error);  // this build has no code of that kernel for the device
struct ComputeCapability {
  int major;
  int minor;
};
ComputeCapability compute_capability(int device);

// The kernels index slots in 32 bits; a cache of more tokens (756 GB) must be refused before.
inline constexpr int64_t kMaxCapacity = INT32_MAX;
// Decode counts a row's indices in 32 bits too, and a few tiles past the last one.
inline constexpr int64_t kMaxTopk = INT32_MAX - 1023;

}  // namespace cuda

}  // namespace nvfp4_dsmla
