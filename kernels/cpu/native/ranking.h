// The slot that goes first under an eviction rule: unprotected before protected, then by value, then by age.
#pragma once

#include <limits>

#include "step.h"

namespace kvorum {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The lowest-ranked slot so far, lane by lane; positions and slots as floats, exact up to 2^24.
struct Lowest {
    float value[LANES], position[LANES], slot[LANES];

    void clear() {
        std::fill(value, value + LANES, INFINITE);
        std::fill(position, position + LANES, INFINITE);
        std::fill(slot, slot + LANES, 0.0f);
    }

    // Offer 16 slots from `first` on, `count` of which are in use.
    void offer(const Sequence& rule, F16 scores, F16 positions, int first, int count) {
        F16 worth = rule.by_age ? zero() : scores;
        if (rule.per_lifetime && !rule.by_age) worth = scores / lifetimes(rule, positions);
        const M16 kept = (positions < splat(float(rule.sink_tokens)))
                         | (splat(float(rule.newest() - rule.recent_tokens)) < positions);
        const F16 slots = load(COUNT) + splat(float(first));
        take(select(kept, splat(INFINITE), worth), positions, slots, load(COUNT) < splat(float(count)));
    }

    void merge(const Lowest& other) {
        take(load(other.value), load(other.position), load(other.slot), load(other.position) < splat(INFINITE));
    }

    int victim() const {
        int best = 0;
        for (int i = 1; i < LANES; ++i)
            if (value[i] < value[best] || (value[i] == value[best] && position[i] < position[best])) best = i;
        return int(slot[best]);
    }

  private:
    void take(F16 values, F16 positions, F16 slots, M16 offered) {
        const F16 best = load(value), at = load(position);
        const M16 taken = ((values < best) | ((values == best) & (positions < at))) & offered;
        store(value, select(taken, values, best));
        store(position, select(taken, positions, at));
        store(slot, select(taken, slots, load(slot)));
    }

    static F16 lifetimes(const Sequence& rule, F16 positions) {
        const F16 since = max(positions, splat(float(rule.observe_from)));
        const F16 queries = max(splat(1.0f), splat(float(rule.newest() + 1)) - since);
        if (rule.decay == 1.0) return queries;
        const F16 decayed = exp(queries * splat(float(std::log(rule.decay))));
        return (splat(1.0f) - decayed) * splat(float(1.0 / (1.0 - rule.decay)));
    }
};

}  // namespace kvorum
