// What this machine can do at most, measured: reading memory, float multiply-adds, int16 dot products.
#include <algorithm>
#include <chrono>
#include <vector>

#include "simd.h"
#include "team.h"

using namespace kvorum;

namespace {

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

#if defined(KVORUM_AVX2)
constexpr int CHAINS = 5;         // of two registers each
#else
constexpr int CHAINS = 12;
#endif
constexpr int64_t AHEAD = 8192;   // floats

// Keep a value alive without storing it.
template <class T>
void keep(const T& value) {
    asm volatile("" : : "r"(&value) : "memory");
}

}  // namespace

extern "C" {

// Bytes per second at which num_threads read a buffer, four streams each, fetching AHEAD of what is added up; the best of
// `rounds`, half of which fetch nothing ahead themselves.
double kvorum_read_bandwidth(const float* buffer, int64_t count, int num_threads, int rounds) {
    double best = 0.0;
    for (int round = 0; round < rounds; ++round) {
        const double start = now_s();
        run_team(num_threads, [&](const Member& member) {
            const int64_t stream = count / num_threads / 4;
            const float* from = buffer + member.index * 4 * stream;
            F16 sums[4] = {zero(), zero(), zero(), zero()};
            const int64_t ahead = round % 2 == 0 ? AHEAD : 0;
            for (int64_t i = 0; i + LANES <= stream; i += LANES)
                for (int s = 0; s < 4; ++s) {
                    __builtin_prefetch(from + s * stream + i + ahead, 0, 2);
                    sums[s] = sums[s] + load(from + s * stream + i);
                }
            keep(sums);
        });
        best = std::max(best, double(count) * sizeof(float) / (now_s() - start));
    }
    return best;
}

// Floating-point operations per second of fused multiply-adds that stay in registers.
double kvorum_fma_rate(int num_threads, int64_t turns) {
    const double start = now_s();
    run_team(num_threads, [&](const Member&) {
        F16 acc[CHAINS];
        const F16 a = splat(0.999f), b = splat(1e-3f);
        // Each lane starts from a number of its own, or the halves of a vector would be computed once.
        float starts[CHAINS + LANES];
        for (int i = 0; i < CHAINS + LANES; ++i) starts[i] = float(i);
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; ++c) acc[c] = load(starts + c);
        for (int64_t turn = 0; turn < turns; ++turn)
#pragma GCC unroll 12
            for (int c = 0; c < CHAINS; ++c) acc[c] = fma(acc[c], a, b);
        keep(acc);
    });
    return 2.0 * LANES * CHAINS * double(turns) * num_threads / (now_s() - start);
}

// The same of dot products of int16, a multiply and an add for each, with activations that are read again at every turn.
double kvorum_dot_rate(int num_threads, int64_t turns) {
    const double start = now_s();
    run_team(num_threads, [&](const Member&) {
        I16 acc[CHAINS];
        uint8_t bytes[64];
        int16_t words[4 * CHAINS];
        for (int i = 0; i < 64; ++i) bytes[i] = uint8_t(i);
        for (int i = 0; i < 4 * CHAINS; ++i) words[i] = int16_t(i);
        const U64 column = load_bytes(bytes);
#pragma GCC unroll 12
        for (int c = 0; c < CHAINS; ++c) acc[c] = splat_int(c);
        for (int64_t turn = 0; turn < turns; ++turn) {
            const int16_t* a = words;
            asm volatile("" : "+r"(a));
#pragma GCC unroll 12
            for (int c = 0; c < CHAINS; ++c) acc[c] = dot(acc[c], column, a + 4 * c);
        }
        keep(acc);
    });
    return 8.0 * LANES * CHAINS * double(turns) * num_threads / (now_s() - start);
}

}  // extern "C"
