// NUMERICS 16: exact attention of a tile of query vectors over pages of 64 positions. A page is reduced alone and pages merge in ascending order,
// so a row's result depends neither on the rows beside it nor on how rows were cut into tiles.
#pragma once
#include "functions.h"
#include "table.h"

namespace quaff::kernels {

template <int n> struct Count { static constexpr int value = n; };

// Calls f(Count<J>, block) over blocks [from, to), J at a time, then J/2 and so on: full register tiles first.
template <int J, class Fn> QUAFF_INLINE void walk_blocks(int from, int to, Fn f) {
    for (; from + J <= to; from += J)
        f(Count<J>{}, from);
    if constexpr (J > 1)
        walk_blocks<J / 2>(from, to, f);
}

template <class V> QUAFF_INLINE typename V::F load_value(const uint16_t* p) { return V::load_f16(p); }
template <class V> QUAFF_INLINE typename V::F load_value(const float* p) { return V::load(p); }

// What one row sees of a page: positions [from, to) of it.
struct Visible {
    int from, to;
};

QUAFF_INLINE Visible visible_part(int32_t position, int32_t window, int32_t page) {
    const int64_t base = int64_t{page} * kPage, first = window ? int64_t{position} - window + 1 - base : 0,
                  past = int64_t{position} + 1 - base;
    return {static_cast<int>(first < 0 ? 0 : first > kPage ? kPage : first), static_cast<int>(past < 0 ? 0 : past > kPage ? kPage : past)};
}

// The state of T rows, one a lane; q and scores are laid out so that inner loops read consecutive memory.
template <class V, int T, class Value = uint16_t> struct AttendTile {
    using F = typename V::F;
    static_assert(T <= kLanes);
    alignas(64) float m[kLanes] = {}, l[kLanes] = {}; // running maximum and sum
    alignas(64) float page_m[kLanes] = {}, page_l[kLanes] = {}, a[kLanes] = {}, b[kLanes] = {};
    Visible visible[T];
    bool started[T] = {};
    float *q, *scores, *o; // [T][dim], [T][64], [T][value_dim]
    const Value *k, *next; // the page that is walked, and the one after it
    int dim, value_dim;
    float cap;

    // The next page's values at the places of J blocks of this one, into L2: pages lie apart, and what the processor fetches by itself ends at
    // their borders. Into L1 there would be no room for them beside this page.
    template <int J> QUAFF_INLINE void fetch(const Value* at) const {
        for (int i = 0; i < J * kLanes; i += 64 / int(sizeof(Value)))
            __builtin_prefetch(next + (at - k) + i, 0, 2);
    }

    // Scores of J blocks of 16 positions: one fma chain over d for each, the soft cap before the mask.
    template <int J> QUAFF_INLINE void score(int block) {
        F s[T][J];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                s[t][j] = V::zero();
        const Value* at = k + block * kLanes;
        const float* qd = q;
        const int64_t stride = dim;
        for (int d = 0; d < dim; ++d, at += kPage, ++qd) {
            fetch<J>(at);
            F kd[J];
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                kd[j] = load_value<V>(at + j * kLanes);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const F x = V::set(qd[t * stride]);
#pragma GCC unroll 4
                for (int j = 0; j < J; ++j)
                    s[t][j] = V::fma(kd[j], x, s[t][j]);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                V::store(scores + t * kPage + (block + j) * kLanes, s[t][j]);
        if (cap != 0.0f)
            for (int t = 0; t < T; ++t)
                for (int j = 0; j < J; ++j) {
                    float* p = scores + t * kPage + (block + j) * kLanes;
                    V::store(p, V::mul(V::set(cap), tanh<V>(V::mul(V::load(p), V::set(1.0f / cap)))));
                }
    }

    // Scores -> page_m, probabilities in place, page_l; every position of the page is visible to every row.
    QUAFF_INLINE void normalise_full() {
        for (int t = 0; t < T; ++t) {
            const float* s = scores + t * kPage;
            F top = V::set(-__builtin_inff());
            for (int i = 0; i < kPage; i += kLanes)
                top = V::max(top, V::load(s + i));
            page_m[t] = V::top(top);
        }
        for (int t = 0; t < T; ++t) {
            float* s = scores + t * kPage;
            const F top = V::set(page_m[t]);
            F sum = V::zero();
#pragma GCC unroll 4
            for (int i = 0; i < kPage; i += kLanes) {
                const F p = probability<V>(V::sub(V::load(s + i), top));
                V::store(s + i, p);
                sum = V::add(sum, p);
            }
            page_l[t] = V::sum(sum);
        }
    }

    // The same where positions are hidden: they count as -inf for the maximum and their p is +0. Blocks outside [from, to) are hidden for all rows.
    QUAFF_INLINE void normalise_masked(int from, int to) {
        for (int t = 0; t < T; ++t) {
            float* s = scores + t * kPage;
            const auto first = V::iset(visible[t].from - 1), past = V::iset(visible[t].to);
            F top = V::set(-__builtin_inff()), sum = V::zero();
            for (int block = from; block < to; ++block) {
                const auto at = V::iadd(V::iota(), V::iset(block * kLanes));
                const auto seen = V::both(V::igt(at, first), V::igt(past, at));
                const F x = V::select(seen, V::load(s + block * kLanes), V::set(-__builtin_inff()));
                V::store(s + block * kLanes, x);
                top = V::max(top, x);
            }
            page_m[t] = visible[t].from < visible[t].to ? V::top(top) : 0.0f;
            const F m_page = V::set(page_m[t]);
            for (int block = from; block < to; ++block) {
                const F p = probability<V>(V::sub(V::load(s + block * kLanes), m_page));
                V::store(s + block * kLanes, p);
                sum = V::add(sum, p);
            }
            page_l[t] = V::sum(sum);
        }
    }

    // (m, l) of all rows at once; a and b are what the running and the page's values are multiplied by.
    QUAFF_INLINE void merge() {
        const F old_m = V::load(m), new_m = V::load(page_m), old_l = V::load(l), top = V::max(old_m, new_m);
        const F fa = probability<V>(V::sub(old_m, top)), fb = probability<V>(V::sub(new_m, top));
        alignas(64) float merged_m[kLanes], merged_l[kLanes];
        V::store(a, fa);
        V::store(b, fb);
        V::store(merged_m, top);
        V::store(merged_l, V::fma(old_l, fa, V::mul(V::load(page_l), fb)));
        for (int t = 0; t < T; ++t) {
            if (visible[t].from >= visible[t].to)
                continue;
            m[t] = started[t] ? merged_m[t] : page_m[t];
            l[t] = started[t] ? merged_l[t] : page_l[t];
        }
    }

    // o of J blocks of 16 dimensions over positions [from, to): what lies outside is hidden for every row. Adding +0 at the end makes a sum that
    // is zero positive, so that hidden positions (p = +0 times any finite V) never show in a sign, whether they were walked or not.
    // With `part` the page's own o is stored there, [T][value_dim], and merged later.
    template <int J> QUAFF_INLINE void weigh(int block, int from, int to, float* part) {
        F sum[T][J];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                sum[t][j] = V::zero();
        const Value* at = k + int64_t{kPage} * dim + int64_t{from} * value_dim + block * kLanes;
        for (int i = from; i < to; ++i, at += value_dim) {
            fetch<J>(at);
            F vi[J];
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                vi[j] = load_value<V>(at + j * kLanes);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const F p = V::set(scores[t * kPage + i]);
#pragma GCC unroll 4
                for (int j = 0; j < J; ++j)
                    sum[t][j] = V::fma(vi[j], p, sum[t][j]);
            }
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            if (visible[t].from >= visible[t].to)
                continue;
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) {
                const int at_o = t * value_dim + (block + j) * kLanes;
                const F page_o = V::add(sum[t][j], V::zero());
                if (part)
                    V::store(part + at_o, page_o);
                else
                    merge_o(t, at_o, page_o);
            }
        }
    }

    QUAFF_INLINE void merge_o(int t, int at, F page_o) {
        V::store(o + at, started[t] ? V::fma(V::load(o + at), V::set(a[t]), V::mul(page_o, V::set(b[t]))) : page_o);
    }

    QUAFF_INLINE void see(const AttendArgs& args, int32_t page) {
        for (int t = 0; t < T; ++t)
            visible[t] = visible_part(args.position[t], args.window, page);
    }

    QUAFF_INLINE void mark_started() {
        for (int t = 0; t < T; ++t)
            started[t] = started[t] || visible[t].from < visible[t].to;
    }

    // One page: reduced and merged, or with `part` reduced only: its m and l by lane, then o [T][value_dim].
    QUAFF_INLINE void page(const Value* at, const Value* after, float* part) {
        k = at;
        next = after;
        int from = kPage, to = 0;
        bool full = true;
        for (int t = 0; t < T; ++t) {
            if (visible[t].from < visible[t].to) {
                from = visible[t].from < from ? visible[t].from : from;
                to = visible[t].to > to ? visible[t].to : to;
            }
            full = full && visible[t].from == 0 && visible[t].to == kPage;
        }
        if (from >= to)
            return;
        const int first_block = from / kLanes, past_block = (to + kLanes - 1) / kLanes;
        walk_blocks<V::kAttendBlocks>(first_block, past_block, [&](auto n, int block) { score<decltype(n)::value>(block); });
        if (full)
            normalise_full();
        else
            normalise_masked(first_block, past_block);
        if (part) {
            V::store(part, V::load(page_m));
            V::store(part + kLanes, V::load(page_l));
        } else {
            merge();
        }
        float* part_o = part ? part + 2 * kLanes : nullptr;
        walk_blocks<V::kAttendBlocks>(0, value_dim / kLanes,
                                      [&](auto n, int block) { weigh<decltype(n)::value>(block, from, to, part_o); });
        mark_started();
    }

    // A page reduced by page(.., part), merged as page(.., nullptr) would have.
    QUAFF_INLINE void merge_part(const float* part) {
        bool any = false;
        for (int t = 0; t < T; ++t)
            any = any || visible[t].from < visible[t].to;
        if (!any)
            return;
        V::store(page_m, V::load(part));
        V::store(page_l, V::load(part + kLanes));
        merge();
        for (int t = 0; t < T; ++t)
            if (visible[t].from < visible[t].to)
                for (int d = 0; d < value_dim; d += kLanes)
                    merge_o(t, t * value_dim + d, V::load(part + 2 * kLanes + t * value_dim + d));
        mark_started();
    }

    // q is multiplied by the scale once, here.
    QUAFF_INLINE void load(const AttendArgs& args) {
        dim = args.dim;
        value_dim = args.value_dim;
        cap = args.cap;
        scores = args.scratch;
        o = scores + T * kPage;
        q = o + T * value_dim;
        for (int t = 0; t < T; ++t)
            for (int d = 0; d < dim; d += kLanes)
                V::store(q + t * dim + d, V::mul(V::load(args.q[t] + d), V::set(args.scale)));
    }

    // A sink takes its part of the probabilities and has no value.
    QUAFF_INLINE void merge_sinks(const float* sinks) {
        alignas(64) float sink[kLanes] = {};
        for (int t = 0; t < T; ++t)
            sink[t] = sinks[t];
        const F old_m = V::load(m), new_m = V::load(sink), top = V::max(old_m, new_m);
        const F fa = probability<V>(V::sub(old_m, top));
        V::store(a, fa);
        V::store(l, V::fma(V::load(l), fa, probability<V>(V::sub(new_m, top))));
        for (int t = 0; t < T; ++t)
            for (int d = 0; d < value_dim; d += kLanes)
                V::store(o + t * value_dim + d, V::mul(V::load(o + t * value_dim + d), V::set(a[t])));
    }

    QUAFF_INLINE void finish(const AttendArgs& args) {
        if (args.sink)
            merge_sinks(args.sink);
        for (int t = 0; t < T; ++t) {
            const auto inverse = V::set(1.0f / l[t]);
            for (int d = 0; d < value_dim; d += kLanes)
                V::store(args.out[t] + d, V::mul(V::load(o + t * value_dim + d), inverse));
        }
    }
};

// What a call does with pages [first, past) of a tile.
enum class Phase { kAll, kParts, kMerge };

template <class V, int T, Phase phase>
[[gnu::noinline]] static void attend_rows(const AttendArgs& args, int32_t first, int32_t past, float* parts, int64_t stride) {
    AttendTile<V, T> tile;
    tile.load(args);
    for (int32_t p = first; p < past; ++p, parts += stride) {
        tile.see(args, p);
        if constexpr (phase == Phase::kMerge)
            tile.merge_part(parts);
        else
            tile.page(args.pages[p] + args.head_offset, args.pages[p + (p + 1 < args.past_page)] + args.head_offset, parts);
    }
    if constexpr (phase != Phase::kParts)
        tile.finish(args);
}

template <class V, Phase phase, int T = V::kAttendRows>
static void attend_pages(const AttendArgs* args, int32_t first, int32_t past, float* parts, int64_t stride) {
    if (args->count == T)
        return attend_rows<V, T, phase>(*args, first, past, parts, stride);
    if constexpr (T > 1)
        attend_pages<V, phase, T - 1>(args, first, past, parts, stride);
}

// Pages that any row of a tile sees.
struct PageRange {
    int32_t first, past;
};

QUAFF_INLINE PageRange pages_seen(const AttendArgs& args) {
    int32_t first = INT32_MAX, past = 0;
    for (int t = 0; t < args.count; ++t) {
        const int32_t i = args.position[t], from = args.window && i >= args.window ? (i - args.window + 1) / kPage : 0;
        first = from < first ? from : first;
        past = i / kPage + 1 > past ? i / kPage + 1 : past;
    }
    return {first, past};
}

template <class V> static void attend(const AttendArgs* args) {
    const PageRange seen = pages_seen(*args);
    attend_pages<V, Phase::kAll>(args, seen.first, seen.past, nullptr, 0);
}

// Over pages of f32, for checking: row by row.
template <class V> static void attend_f32(const AttendArgs* args) {
    for (int t = 0; t < args->count; ++t) {
        AttendArgs one = *args;
        one.count = 1;
        one.q += t;
        one.out += t;
        one.position += t;
        one.sink = one.sink ? one.sink + t : nullptr;
        AttendTile<V, 1, float> tile;
        tile.load(one);
        for (auto [p, past] = pages_seen(one); p < past; ++p) {
            tile.see(one, p);
            const auto* page = reinterpret_cast<const float*>(one.pages[p] + one.head_offset);
            tile.page(page, page, nullptr);
        }
        tile.finish(one);
    }
}

// K is stored transposed, so that a score's chain over d runs with positions in the lanes. The clamp's operand order turns NaN into -65504: pages
// hold finite values only, and a poisoned row cannot reach others through p = +0.
template <class V, typename T>
static void kv_write(const float* k, const float* v, T* kpage, T* vpage, int64_t dim, int64_t value_dim, int64_t slot) {
    const auto low = V::set(-kF16Max), high = V::set(kF16Max);
    const auto put = [&](T* to, const float* from) {
        const auto clamped = V::min(V::max(V::load(from), low), high);
        if constexpr (sizeof(T) == 2)
            V::store_f16(to, clamped);
        else
            V::store(to, clamped);
    };
    for (int64_t d = 0; d < dim; d += kLanes) {
        T column[kLanes];
        put(column, k + d);
        for (int j = 0; j < kLanes; ++j)
            kpage[(d + j) * kPage + slot] = column[j];
    }
    for (int64_t d = 0; d < value_dim; d += kLanes)
        put(vpage + slot * value_dim + d, v + d);
}

} // namespace quaff::kernels
