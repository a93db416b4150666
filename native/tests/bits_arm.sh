#!/usr/bin/env bash
# Builds the bits program for this x86-64 machine and for aarch64, runs the second under emulation and compares their hashes line by line.
# What stands here of flags stands in CMakeLists.txt too; it is repeated because the cross build needs neither CMake nor Python.
set -euo pipefail
cd "$(dirname "$0")/../.."

CXX=${CXX:-g++}
ARM_CXX=${ARM_CXX:-aarch64-linux-gnu-g++}
QEMU=${QEMU:-qemu-aarch64}
JOBS=${JOBS:-2}
OUT=build/bits-arm

for tool in "$CXX" "$ARM_CXX" "$QEMU"; do
    command -v "$tool" >/dev/null || {
        echo "$tool is missing; on Debian: apt-get install -y g++ g++-aarch64-linux-gnu qemu-user" >&2
        exit 2
    }
done
[ "$(uname -m)" = x86_64 ] || {
    echo "this compares an x86-64 machine with emulated aarch64; on another machine use make bits" >&2
    exit 2
}

FLAGS="-std=c++20 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -pthread -Inative"
AVX2="-mavx2 -mfma -mf16c"
COMMON="native/kernels/scratch.cpp native/runtime/cpu.cpp native/runtime/dispatch.cpp native/runtime/sample.cpp native/runtime/threads.cpp native/tests/bits.cpp"

# One compile command per line: folder, compiler, source, flags of its own.
units() {
    local source
    for source in $COMMON native/isa/isa_scalar.cpp; do
        echo "x86 $CXX $source"
        echo "arm $ARM_CXX $source"
    done
    echo "x86 $CXX native/isa/isa_avx2.cpp $AVX2"
    echo "x86 $CXX native/isa/isa_avxvnni.cpp $AVX2 -mavxvnni"
    echo "x86 $CXX native/isa/isa_avx512.cpp $AVX2 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni"
    echo "arm $ARM_CXX native/isa/isa_neon.cpp -march=armv8.2-a+dotprod+fp16"
}

compile() { # compile FOLDER COMPILER SOURCE FLAGS...
    local folder=$1 compiler=$2 source=$3
    shift 3
    "$compiler" $FLAGS "$@" -c "$source" -o "$OUT/$folder/$(basename "$source" .cpp).o"
}
export -f compile
export FLAGS OUT

rm -rf "$OUT"
mkdir -p "$OUT/x86" "$OUT/arm"
echo "compiling for x86-64 and aarch64 ..." >&2
units | xargs -P "$JOBS" -I{} bash -ec 'compile {}'
"$CXX" "$OUT"/x86/*.o -pthread -o "$OUT/bits_x86"
"$ARM_CXX" "$OUT"/arm/*.o -static -pthread -o "$OUT/bits_arm"

"$OUT/bits_x86" >"$OUT/x86.txt"
"$QEMU" -cpu max "$OUT/bits_arm" >"$OUT/arm.txt"
"$QEMU" -cpu max "$OUT/bits_arm" neon >"$OUT/neon.txt" # fails where the emulated processor has no NEON dot product: never pass on scalar alone
cmp "$OUT/arm.txt" "$OUT/neon.txt"

cat "$OUT/x86.txt"
total=$(wc -l <"$OUT/x86.txt")
equal=$(comm -12 <(sort "$OUT/x86.txt") <(sort "$OUT/arm.txt") | wc -l)
if [ "$equal" != "$total" ] || ! cmp -s "$OUT/x86.txt" "$OUT/arm.txt"; then
    diff "$OUT/x86.txt" "$OUT/arm.txt" >&2 || true
    echo "only $equal of $total hashes are equal on x86-64 and aarch64" >&2
    exit 1
fi
echo "$equal of $total hashes are equal on x86-64 and aarch64 (NEON and scalar)"
