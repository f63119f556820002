// A tape: calls of kernels that were recorded in one step, and are made again for other steps. tape.py records them.
//
// Returning to Python between two kernels would be slow: another thread may hold the interpreter's lock, and the weights have
// displaced the interpreter's memory from the cache.

#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels.h"
#include "threads.h"

namespace {

template <typename T>
T argument(int64_t bits) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(bits);
    } else {
        T value;
        std::memcpy(&value, &bits, sizeof(T));
        return value;
    }
}

template <typename Result, typename... Arguments, size_t... kIndex>
int32_t call(Result (*function)(Arguments...), const int64_t* arguments, std::index_sequence<kIndex...>) {
    static_assert(sizeof...(Arguments) <= kTapeArguments);
    if constexpr (std::is_void_v<Result>) {
        function(argument<Arguments>(arguments[kIndex])...);
        return 0;
    } else {
        return function(argument<Arguments>(arguments[kIndex])...);
    }
}

template <typename Result, typename... Arguments>
constexpr std::index_sequence_for<Arguments...> indices_of(Result (*)(Arguments...)) {
    return {};
}

template <auto kFunction>
int32_t call_function(const int64_t* arguments) {
    return call(kFunction, arguments, indices_of(kFunction));
}

constexpr int32_t (*kFunctions[])(const int64_t*) = {  // in the order of `TAPED` in recording.py
    call_function<inflight_rms_norm>,        call_function<inflight_norm_and_rotate>, call_function<inflight_linear>,
    call_function<inflight_paged_attention>, call_function<inflight_select_rows>,     call_function<inflight_all_reduce>,
    call_function<inflight_all_gather>,      call_function<inflight_gated_delta>,
    call_function<inflight_multiply_activation>, call_function<inflight_add_and_scale>,
    call_function<inflight_short_conv>,      call_function<inflight_linear_of_heads>, call_function<inflight_copy_heads>,
    call_function<inflight_choose_experts>,  call_function<inflight_experts>,         call_function<inflight_add_experts>,
    call_function<inflight_layer_norm>,      call_function<inflight_activate>,
    call_function<inflight_exchange_experts>,
};

int32_t replay(const TapeCall* calls, int64_t num_calls, const TapePatch* patches, const int64_t* values) {
    for (const TapeCall* call = calls; call < calls + num_calls; call++) {
        int64_t arguments[kTapeArguments];
        std::memcpy(arguments, call->arguments, sizeof(arguments));
        for (const TapePatch* end = patches + call->num_patches; patches < end; patches++)
            arguments[patches->argument] =
                values[patches->base] + values[patches->count] * patches->per_count + patches->offset;
        if (const int32_t error = kFunctions[call->function](arguments)) return error;
    }
    return 0;
}

}  // namespace

extern "C" int32_t inflight_replay(
    const TapeCall* calls, int64_t num_calls, const TapePatch* patches, const int64_t* values) {
    int32_t error = 0;
    with_team([&] { error = replay(calls, num_calls, patches, values); });  // one team for all calls
    return error;
}
