// NUMERICS 16: attention of a tile of query vectors over pages of 64 positions. A page is reduced alone and pages merge in ascending order,
// so a row's result depends neither on the rows beside it nor on how rows were cut into tiles. Pages hold codes of 13 bits, two positions or two
// dimensions beside each other, because instructions that multiply pairs of 16 bits do twice what an f32 fma does; sums of codes are exact.
#pragma once
#include "functions.h"
#include "table.h"

#include <type_traits>

namespace quaff::kernels {

template <int n> struct Count { static constexpr int value = n; };

// Calls f(Count<J>, block) over blocks [from, to), J at a time, then J/2 and so on: full register tiles first.
template <int J, class Fn> QUAFF_INLINE void walk_blocks(int from, int to, Fn f) {
    for (; from + J <= to; from += J)
        f(Count<J>{}, from);
    if constexpr (J > 1)
        walk_blocks<J / 2>(from, to, f);
}

// 2^x for x <= 0, +0 below kPowerMin: probabilities of scores in units of ln 2.
template <class V> QUAFF_INLINE typename V::F power(typename V::F x) {
    const auto n = V::rint(x), r = V::sub(x, n);
    auto y = V::fma(V::set(kPowerC5), r, V::set(kPowerC4));
    y = V::fma(y, r, V::set(kPowerC3));
    y = V::fma(y, r, V::set(kPowerC2));
    y = V::fma(y, r, V::set(kPowerC1));
    return V::zero_where(V::lt(x, V::set(kPowerMin)), V::ldexp(V::fma(y, r, V::set(1.0f)), n));
}

// Codes of n values, each 16 of them given to put(index, codes), and their scale: the largest magnitude over kKvCode, rounded up to a bf16. Below
// 2^-64 all codes are 0.
template <class V, class Put> QUAFF_INLINE float encode(const float* x, int64_t n, Put put) {
    auto top = V::iset(0);
    for (int64_t i = 0; i < n; i += kLanes)
        top = V::imax(top, V::iand(V::bits(V::load(x + i)), V::iset(0x7fffffff)));
    const int32_t bits = V::itop(top);
    float largest, factor = 0.0f, scale = 0.0f;
    __builtin_memcpy(&largest, &bits, 4);
    if (bits >= 0x7f800000) { // a row that is not finite shows, whatever its codes
        scale = __builtin_nanf("");
    } else if (bits >= kTinyBits) {
        const float exact = largest / kKvCode;
        uint32_t word;
        __builtin_memcpy(&word, &exact, 4);
        word = (word + 0xffff) & 0xffff0000;
        __builtin_memcpy(&scale, &word, 4);
        factor = 1.0f / scale;
    }
    for (int64_t i = 0; i < n; i += kLanes)
        put(i, factor == 0.0f ? V::iset(0) : V::round(V::mul(V::load(x + i), V::set(factor))));
    return scale;
}

// What one row sees of a page: positions [from, to) of it.
struct Visible {
    int from, to;
};

QUAFF_INLINE Visible visible_part(int32_t position, int32_t window, int32_t page) {
    const int64_t base = int64_t{page} * kPage, first = window ? int64_t{position} - window + 1 - base : 0,
                  past = int64_t{position} + 1 - base;
    return {static_cast<int>(first < 0 ? 0 : first > kPage ? kPage : first), static_cast<int>(past < 0 ? 0 : past > kPage ? kPage : past)};
}

// One head's part of a page. Of codes: K [dim/2][64][2], V [32][value_dim][2], bf16 scales of K [64] and of V [64]. Of f32: K [dim][64],
// V [64][value_dim].
template <class Value> struct HeadPage {
    static constexpr bool codes = sizeof(Value) == 2;
    static constexpr int pair = codes ? 2 : 1;
    const Value* k;
    int dim, value_dim;
    QUAFF_INLINE const Value* v() const { return k + int64_t{kPage} * dim; }
    QUAFF_INLINE const uint16_t* k_scale() const { return reinterpret_cast<const uint16_t*>(v() + int64_t{kPage} * value_dim); }
    QUAFF_INLINE const uint16_t* v_scale() const { return k_scale() + kPage; }
};

template <class Value> QUAFF_INLINE const Value* head_page(const AttendArgs& args, int32_t page) {
    return reinterpret_cast<const Value*>(args.pages[page] + args.head_offset);
}

// The state of up to V::kAttendRows rows, one a lane; q and scores are laid out so that inner loops read consecutive memory. What runs over all
// values of a page has the number of rows, T, as a template argument.
template <class V, class Value = int16_t> struct AttendTile {
    using F = typename V::F;
    static constexpr int kRows = V::kAttendRows;
    static_assert(kRows <= kLanes);
    static constexpr bool codes = HeadPage<Value>::codes;
    static constexpr int pair = HeadPage<Value>::pair;
    alignas(64) float m[kLanes] = {}, l[kLanes] = {}, started[kLanes] = {}; // running maximum and sum, and 1 once they are of something
    alignas(64) float page_m[kLanes] = {}, page_l[kLanes] = {}, page_v[kLanes], a[kLanes] = {}, b[kLanes] = {}, q_scale[kLanes] = {};
    alignas(64) int32_t from[kLanes] = {}, past[kLanes] = {}; // visible positions of the page: [from, past)
    alignas(64) float tops[kRows * kLanes];                   // the page's maximum of every sixteenth score
    float *scores, *o;                                        // [T][64], [T][value_dim]
    Value *q, *p;                                             // [T][dim], [T][64]: what meets K and V
    HeadPage<Value> at;
    const Value* next; // the page after the one that is walked
    int rows, dim, value_dim;
    float cap;

    // The next page's values at the places of J blocks of this one, into L2: pages lie apart, and what the processor fetches by itself ends at
    // their borders. Into L1 there would be no room for them beside this page.
    template <int J> QUAFF_INLINE void fetch(const Value* values) const {
        for (int i = 0; i < J * kLanes * pair; i += 64 / int(sizeof(Value)))
            __builtin_prefetch(next + (values - at.k) + i, 0, 2);
    }

    QUAFF_INLINE void fetch_scales(const Value* head) const {
        if constexpr (codes)
            for (int i = 0; i < 2 * kPage; i += 64 / int(sizeof(Value)))
                __builtin_prefetch(head + int64_t{kPage} * (dim + value_dim) + i, 0, 2);
    }

    // sum[t][j] += J blocks of 16 positions or dimensions at `values` times what row t has at x[t * stride]: a pair of codes each, or an f32. Sums of
    // codes are integers, held in F as bits: of arrays of integer vectors g++ 12 keeps copies in memory.
    template <int T, int J> QUAFF_INLINE void multiply(F (&sum)[T][J], const Value* values, const Value* x, int64_t stride) const {
        fetch<J>(values);
        if constexpr (codes) {
            typename V::Pairs y[J];
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                y[j] = V::load_pairs(values + j * kLanes * 2);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const auto both = V::set_pair(x + t * stride);
#pragma GCC unroll 4
                for (int j = 0; j < J; ++j)
                    sum[t][j] = V::dot_pairs(sum[t][j], y[j], both);
            }
        } else {
            F y[J];
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                y[j] = V::load(values + j * kLanes);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                const F one = V::set(x[t * stride]);
#pragma GCC unroll 4
                for (int j = 0; j < J; ++j)
                    sum[t][j] = V::fma(y[j], one, sum[t][j]);
            }
        }
    }

    // Scores of J blocks of 16 positions, finished, and their maxima into tops. Integer sums are exact over kDotDims dimensions; f32 is one fma chain
    // over all. Where positions are `hidden` they count as -inf.
    template <int T, int J, bool hidden> QUAFF_INLINE void score(int block) {
        const Value* values = at.k + block * kLanes * pair;
        const int step = codes ? kDotDims : dim;
        for (int begin = 0; begin < dim; begin += step) {
            F s[T][J];
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                for (int j = 0; j < J; ++j)
                    s[t][j] = V::zero();
            for (int d = begin, end = begin + step < dim ? begin + step : dim; d < end; d += pair, values += kPage * pair)
                multiply(s, values, q + d, dim);
            float* to = scores + block * kLanes;
            if constexpr (codes)
#pragma GCC unroll 8
                for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                    for (int j = 0; j < J; ++j) {
                        s[t][j] = V::to_float(V::bits(s[t][j]));
                        if (begin)
                            s[t][j] = V::add(V::load(to + t * kPage + j * kLanes), s[t][j]);
                    }
            if (begin + step >= dim)
                finish_scores<T, J, hidden>(s, block);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
                for (int j = 0; j < J; ++j)
                    V::store(to + t * kPage + j * kLanes, s[t][j]);
        }
    }

    // Scales of codes, the soft cap and what is hidden.
    template <int T, int J, bool hidden> QUAFF_INLINE void finish_scores(F (&s)[T][J], int block) {
        F k_scale[J];
        if constexpr (codes)
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                k_scale[j] = V::load_bf16(at.k_scale() + (block + j) * kLanes);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            F top = V::load(tops + t * kLanes);
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) {
                F x = s[t][j];
                if constexpr (codes)
                    x = V::mul(V::mul(x, k_scale[j]), V::set(q_scale[t]));
                if (cap != 0.0f)
                    x = V::mul(V::set(cap * kLog2e), tanh<V>(V::mul(x, V::set(1.0f / cap))));
                if constexpr (hidden) {
                    const auto position = V::iadd(V::iota(), V::iset((block + j) * kLanes));
                    const auto seen = V::both(V::igt(position, V::iset(from[t] - 1)), V::igt(V::iset(past[t]), position));
                    x = V::select(seen, x, V::set(-__builtin_inff()));
                }
                top = V::max(top, x);
                s[t][j] = x;
            }
            V::store(tops + t * kLanes, top);
        }
    }

    // Lane t is the fold of x[t]; what lanes from T on hold is not used.
    template <int T> QUAFF_INLINE static F top_of_each(const F (&x)[T]) {
        if constexpr (T > 2 && requires { V::tops(x); })
            return V::tops(x);
        alignas(64) float lanes[kLanes] = {};
        for (int t = 0; t < T; ++t)
            lanes[t] = V::top(x[t]);
        return V::load(lanes);
    }
    template <int T> QUAFF_INLINE static F sum_of_each(const F (&x)[T]) {
        if constexpr (T > 2 && requires { V::sums(x); })
            return V::sums(x);
        alignas(64) float lanes[kLanes] = {};
        for (int t = 0; t < T; ++t)
            lanes[t] = V::sum(x[t]);
        return V::load(lanes);
    }

    // Rows that see some of the page, a truth value a lane.
    QUAFF_INLINE typename V::M seeing() const { return V::igt(V::iload(past), V::iload(from)); }

    // Scores of blocks [first, end) -> page_m, p, page_l, page_v. What lies outside is hidden for all rows, and there p is not read. Codes take the
    // scales of V with them: what is largest becomes kPCode.
    template <int T> QUAFF_INLINE void weights(int first, int end) {
        F top[T], sum[T], largest[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
            top[t] = V::load(tops + t * kLanes);
        V::store(page_m, V::select(seeing(), top_of_each<T>(top), V::zero()));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
            sum[t] = largest[t] = V::zero();
        for (int block = first; block < end; ++block) {
            F v_scale;
            if constexpr (codes)
                v_scale = V::load_bf16(at.v_scale() + block * kLanes);
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                float* s = scores + t * kPage + block * kLanes;
                F x = power<V>(V::sub(V::load(s), V::set(page_m[t])));
                sum[t] = V::add(sum[t], x);
                if constexpr (codes) {
                    x = V::mul(x, v_scale);
                    largest[t] = V::max(largest[t], x);
                }
                V::store(s, x);
            }
        }
        V::store(page_l, sum_of_each<T>(sum));
        if constexpr (codes) {
            V::store(page_v, top_of_each<T>(largest));
            encode_weights<T>(first, end);
        }
    }

    // p in blocks [first, end) as codes, and in page_v what a code is worth.
    template <int T> QUAFF_INLINE void encode_weights(int first, int end) {
        const F top = V::load(page_v);
        const auto tiny = V::lt(top, V::set(kTiny));
        alignas(64) float factor[kLanes];
        V::store(factor, V::zero_where(tiny, V::div(V::set(kPCode), top)));
        V::store(page_v, V::zero_where(tiny, V::div(top, V::set(kPCode))));
        for (int i = first * kLanes; i < end * kLanes; i += kLanes)
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t)
                V::store_i16(p + t * kPage + i, V::round(V::mul(V::load(scores + t * kPage + i), V::set(factor[t]))));
    }

    // (m, l) of all rows at once; a and b are what the running and the page's sums are multiplied by.
    QUAFF_INLINE void merge() {
        const F old_m = V::load(m), new_m = V::load(page_m), old_l = V::load(l), new_l = V::load(page_l), worth = V::load(page_v),
                top = V::max(old_m, new_m);
        const F fa = power<V>(V::sub(old_m, top)), fb = power<V>(V::sub(new_m, top));
        const auto seen = seeing(), begun = V::gt(V::load(started), V::zero());
        V::store(a, fa);
        V::store(b, V::select(begun, V::mul(fb, worth), worth));
        V::store(m, V::select(seen, V::select(begun, top, new_m), old_m));
        V::store(l, V::select(seen, V::select(begun, V::fma(old_l, fa, V::mul(new_l, fb)), new_l), old_l));
    }

    // The page's sums of J blocks of 16 dimensions over positions [begin, end): what lies outside is hidden for every row. Adding +0 at the end makes
    // a sum that is zero positive, so that hidden positions (p = +0 times any finite V) never show in a sign, whether they were walked or not.
    // With `part` they are stored there, [T][value_dim], and merged later.
    template <int T, int J> QUAFF_INLINE void weigh(int block, int begin, int end, float* part) {
        F sum[T][J];
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j)
                sum[t][j] = V::zero();
        const int first = begin / pair, stop = (end + pair - 1) / pair;
        const Value* v = at.v() + (int64_t{first} * value_dim + block * kLanes) * pair;
        for (int i = first; i < stop; ++i, v += value_dim * pair)
            multiply(sum, v, p + i * pair, kPage);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            if (from[t] >= past[t])
                continue;
#pragma GCC unroll 4
            for (int j = 0; j < J; ++j) {
                const int at_o = t * value_dim + (block + j) * kLanes;
                const F page_o = codes ? V::to_float(V::bits(sum[t][j])) : V::add(sum[t][j], V::zero());
                if (part)
                    V::store(part + at_o, page_o);
                else
                    merge_o(t, at_o, page_o);
            }
        }
    }

    QUAFF_INLINE void merge_o(int t, int at_o, F page_o) {
        const F scaled = V::mul(page_o, V::set(b[t]));
        V::store(o + at_o, started[t] != 0.0f ? V::fma(V::load(o + at_o), V::set(a[t]), scaled) : scaled);
    }

    // What of a page each row sees; true when one sees any.
    QUAFF_INLINE bool see(const AttendArgs& args, int32_t page) {
        bool any = false;
        for (int t = 0; t < rows; ++t) {
            const Visible part = visible_part(args.position[t], args.window, page);
            from[t] = part.from, past[t] = part.to;
            any = any || part.from < part.to;
        }
        return any;
    }

    QUAFF_INLINE void mark_started() { V::store(started, V::select(seeing(), V::set(1.0f), V::load(started))); }

    // Positions that any row sees.
    QUAFF_INLINE Visible together() const {
        Visible all{kPage, 0};
        for (int t = 0; t < rows; ++t)
            if (from[t] < past[t])
                all = {from[t] < all.from ? from[t] : all.from, past[t] > all.to ? past[t] : all.to};
        return all;
    }

    // Calls fn(Count<T>) for the T that is `rows`.
    template <int T = kRows, class Fn> QUAFF_INLINE void with_rows(Fn fn) {
        if (rows == T)
            return fn(Count<T>{});
        if constexpr (T > 1)
            with_rows<T - 1>(fn);
    }

    // A page that some row sees: reduced and merged, or with `part` reduced only: m, l and v by lane, then sums [T][value_dim].
    template <int T> [[gnu::noinline]] void page(float* part) {
        const Visible all = together();
        const int first = all.from / kLanes, end = (all.to + kLanes - 1) / kLanes;
        bool full = true;
        for (int t = 0; t < T; ++t) {
            full = full && from[t] == 0 && past[t] == kPage;
            V::store(tops + t * kLanes, V::set(-__builtin_inff()));
        }
        if (full)
            walk_blocks<V::kAttendBlocks>(first, end, [&](auto n, int block) { score<T, decltype(n)::value, false>(block); });
        else
            walk_blocks<V::kAttendBlocks>(first, end, [&](auto n, int block) { score<T, decltype(n)::value, true>(block); });
        fetch_scales(next);
        weights<T>(first, end);
        float* sums = nullptr;
        if (part) {
            V::store(part, V::load(page_m));
            V::store(part + kLanes, V::load(page_l));
            V::store(part + 2 * kLanes, V::load(page_v));
            sums = part + 3 * kLanes;
        } else {
            merge();
        }
        walk_blocks<V::kAttendBlocks>(0, value_dim / kLanes,
                                      [&](auto n, int block) { weigh<T, decltype(n)::value>(block, all.from, all.to, sums); });
        mark_started();
    }

    // Page p, if a row sees any of it.
    QUAFF_INLINE void walk(const AttendArgs& args, int32_t p, float* part) {
        at = {head_page<Value>(args, p), dim, value_dim};
        next = head_page<Value>(args, p + (p + 1 < args.past_page));
        if (see(args, p))
            with_rows([&](auto n) { page<decltype(n)::value>(part); });
    }

    // What page left in `part`, merged as it would have done.
    QUAFF_INLINE void merge_part(const float* part) {
        V::store(page_m, V::load(part));
        V::store(page_l, V::load(part + kLanes));
        V::store(page_v, V::load(part + 2 * kLanes));
        merge();
        for (int t = 0; t < rows; ++t)
            if (from[t] < past[t])
                for (int d = 0; d < value_dim; d += kLanes)
                    merge_o(t, t * value_dim + d, V::load(part + 3 * kLanes + t * value_dim + d));
        mark_started();
    }

    QUAFF_INLINE void begin(const AttendArgs& args) {
        rows = args.count;
        dim = args.dim;
        value_dim = args.value_dim;
        cap = args.cap;
        scores = args.scratch;
        o = scores + kRows * kPage;
        V::store(page_v, V::set(1.0f));
    }

    // q is multiplied by the scale once, here; without a cap it takes scores to units of ln 2 too.
    QUAFF_INLINE void read_queries(const AttendArgs& args) {
        float* rest = o + kRows * value_dim;
        const float factor = cap == 0.0f ? args.scale * kLog2e : args.scale;
        const auto scale = [&](int t, float* to) {
            for (int d = 0; d < dim; d += kLanes)
                V::store(to + d, V::mul(V::load(args.q[t] + d), V::set(factor)));
        };
        if constexpr (codes) {
            q = reinterpret_cast<Value*>(rest + dim);
            p = q + kRows * dim;
            for (int t = 0; t < rows; ++t) {
                scale(t, rest);
                q_scale[t] = encode<V>(rest, dim, [&](int64_t i, typename V::I codes) { V::store_i16(q + t * dim + i, codes); });
            }
        } else {
            q = rest;
            p = scores;
            for (int t = 0; t < rows; ++t)
                scale(t, q + t * dim);
        }
    }

    // A sink takes its part of the probabilities and has no value.
    QUAFF_INLINE void merge_sinks(const float* sinks) {
        alignas(64) float sink[kLanes] = {};
        for (int t = 0; t < rows; ++t)
            sink[t] = sinks[t] * kLog2e;
        const F old_m = V::load(m), new_m = V::load(sink), top = V::max(old_m, new_m);
        const F fa = power<V>(V::sub(old_m, top));
        V::store(a, fa);
        V::store(l, V::fma(V::load(l), fa, power<V>(V::sub(new_m, top))));
        for (int t = 0; t < rows; ++t)
            for (int d = 0; d < value_dim; d += kLanes)
                V::store(o + t * value_dim + d, V::mul(V::load(o + t * value_dim + d), V::set(a[t])));
    }

    QUAFF_INLINE void finish(const AttendArgs& args) {
        if (args.sink)
            merge_sinks(args.sink);
        for (int t = 0; t < rows; ++t) {
            const auto inverse = V::set(1.0f / l[t]);
            for (int d = 0; d < value_dim; d += kLanes)
                V::store(args.out[t] + d, V::mul(V::load(o + t * value_dim + d), inverse));
        }
    }
};

// Pages that any row of a call sees.
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

// The rows of a call: up to kTilesTogether tiles, which pass over a page one after the other, so that it comes from memory once.
template <class V, class Value = int16_t> struct AttendTiles {
    using Tile = AttendTile<V, Value>;
    AttendArgs args[kTilesTogether];
    Tile tiles[kTilesTogether];
    int count = 0;

    QUAFF_INLINE explicit AttendTiles(const AttendArgs& all) {
        for (int row = 0; row < all.count; row += Tile::kRows, ++count) {
            AttendArgs& a = args[count] = all;
            a.count = all.count - row < Tile::kRows ? all.count - row : Tile::kRows;
            a.q += row, a.out += row, a.position += row;
            a.sink = all.sink ? all.sink + row : nullptr;
            a.scratch += count * attend_tile_floats(all.dim, all.value_dim, Tile::kRows);
            tiles[count].begin(a);
        }
    }

    // Pages [first, past), in order; with parts, `stride` floats a page.
    QUAFF_INLINE void walk(int32_t first, int32_t past, float* parts, int64_t stride) {
        for (int i = 0; i < count; ++i)
            tiles[i].read_queries(args[i]);
        tiles[0].fetch_scales(head_page<Value>(args[0], first));
        for (int32_t p = first; p < past; ++p, parts = parts ? parts + stride : nullptr)
            for (int i = 0; i < count; ++i)
                tiles[i].walk(args[i], p, parts ? part(parts, i) : nullptr);
    }

    // What pages [first, past) left in `parts`.
    QUAFF_INLINE void merge(int32_t first, int32_t past, float* parts, int64_t stride) {
        for (int i = 0; i < count; ++i)
            for (int32_t p = first; p < past; ++p)
                if (tiles[i].see(args[i], p))
                    tiles[i].merge_part(part(parts + (p - first) * stride, i));
    }

    QUAFF_INLINE void finish() {
        for (int i = 0; i < count; ++i)
            tiles[i].finish(args[i]);
    }

    QUAFF_INLINE float* part(float* of_page, int i) const { return of_page + i * (3 * kLanes + Tile::kRows * args[0].value_dim); }
};

template <class V, class Value = int16_t> static void attend(const AttendArgs* args) {
    AttendTiles<V, Value> tiles(*args);
    const PageRange seen = pages_seen(*args);
    tiles.walk(seen.first, seen.past, nullptr, 0);
    tiles.finish();
}

template <class V> static void attend_parts(const AttendArgs* args, int32_t first, int32_t past, float* parts, int64_t stride) {
    AttendTiles<V>(*args).walk(first, past, parts, stride);
}

template <class V> static void attend_merge(const AttendArgs* args, int32_t first, int32_t past, float* parts, int64_t stride) {
    AttendTiles<V> tiles(*args);
    tiles.merge(first, past, parts, stride);
    tiles.finish();
}

// The clamp's operand order turns NaN into -65504: pages hold finite values only, and a poisoned row cannot reach others through p = +0.
template <class V> QUAFF_INLINE void clamp_row(const float* from, float* to, int64_t n) {
    for (int64_t d = 0; d < n; d += kLanes)
        V::store(to + d, V::min(V::max(V::load(from + d), V::set(-kF16Max)), V::set(kF16Max)));
}

// K and V of one position into a page of codes: K is transposed, so that a score's sum over d runs with positions in the lanes; V goes into the
// low or high halves of words that it shares with its neighbour.
template <class V> static void kv_write(const float* k, const float* v, uint16_t* page, int64_t dim, int64_t value_dim, int64_t slot) {
    alignas(64) float row[kMaxHeadDim];
    alignas(64) int16_t column[kLanes];
    uint16_t *values = page + kPage * dim, *scales = values + kPage * value_dim;
    const auto upper = [](float x) {
        uint32_t word;
        __builtin_memcpy(&word, &x, 4);
        return static_cast<uint16_t>(word >> 16);
    };
    clamp_row<V>(k, row, dim);
    scales[slot] = upper(encode<V>(row, dim, [&](int64_t d, typename V::I codes) {
        V::store_i16(column, codes);
        for (int64_t j = 0; j < kLanes; j += 2)
            __builtin_memcpy(page + (d + j) * kPage + slot * 2, column + j, 4);
    }));
    clamp_row<V>(v, row, value_dim);
    values += slot / 2 * 2 * value_dim;
    scales[kPage + slot] = upper(encode<V>(row, value_dim, [&](int64_t d, typename V::I codes) {
        alignas(64) int32_t words[kLanes];
        __builtin_memcpy(words, values + 2 * d, sizeof words);
        const auto low = slot % 2 ? V::iload(words) : codes, high = slot % 2 ? V::template shl<16>(codes) : V::iload(words);
        V::istore(words, V::ior(V::iand(low, V::iset(0xffff)), V::iand(high, V::iset(INT32_MIN >> 15))));
        __builtin_memcpy(values + 2 * d, words, sizeof words);
    }));
}

template <class V> static void kv_write_f32(const float* k, const float* v, float* page, int64_t dim, int64_t value_dim, int64_t slot) {
    alignas(64) float row[kMaxHeadDim];
    clamp_row<V>(k, row, dim);
    for (int64_t d = 0; d < dim; ++d)
        page[d * kPage + slot] = row[d];
    clamp_row<V>(v, page + kPage * dim + slot * value_dim, value_dim);
}

} // namespace quaff::kernels
