// Packs key columns into keys of one width. Packed keys are equal exactly when all fields are
// equal, and they sort in the order of the fields' values.

#include "common.cuh"
#include "values.cuh"

namespace dovetail {
namespace {

constexpr u32 THREADS = 256;

__device__ inline Wide widened(u32 key) { return {key, 0}; }
__device__ inline Wide widened(u64 key) { return {key, 0}; }
__device__ inline Wide widened(Key16 key) { return {key.low, key.high}; }

template <typename Key>
__global__ void pack(DovetailPackKeys args) {
    const u64 at = u64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= args.rows) return;
    const u64 row = args.kept ? args.kept[at] : at;
    Key* keys = static_cast<Key*>(args.keys);
    Wide key = args.accumulate ? widened(keys[at]) : Wide{0, 0};
    for (u32 index = 0; index < args.field_count; ++index) {
        const DovetailKeyField& field = args.fields[index];
        const bool valid = is_valid(field.validity, row);
        Wide bits{0, 0};
        if (valid && field.bits > 0) bits = shifted(cut(image(field.data, field.width, field.encoding, Wide{field.min_low, field.min_high}, row), field.bits), field.shift);
        if (!valid && field.null_bit >= 0) bits = shifted({1, 0}, u32(field.null_bit));
        key.low |= bits.low;
        key.high |= bits.high;
    }
    narrow(key, keys[at]);
}

}  // namespace
}  // namespace dovetail

using namespace dovetail;

int dovetail_pack_keys(const DovetailPackKeys* args, DovetailStream stream) {
    return with_key(args->key_bytes, [&](auto key) {
        pack<decltype(key)><<<blocks_for(args->rows, THREADS), THREADS, 0, cudaStream_t(stream)>>>(*args);
        return launched();
    });
}
