#include "cpu.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace quaff {

CpuFeatures cpu_features() {
    CpuFeatures f;
#if defined(__x86_64__)
    __builtin_cpu_init();
    f.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    f.avxvnni = f.avx2 && __builtin_cpu_supports("avxvnni");
    f.avx512 = f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && defined(__linux__)
    const unsigned long caps = getauxval(AT_HWCAP);
    f.neon = (caps & HWCAP_ASIMDDP) && (caps & HWCAP_ASIMDHP);
#endif
    return f;
}

// From Zen 5 (family 26) on, AMD's cores have so many misses in flight that a stream of 4-bit weights runs half as fast again when it is asked for;
// on Zen 4 the same requests take what the prefetcher needs and cost a quarter. Others were not measured.
int64_t fetch_ahead_bytes() {
#if defined(__x86_64__)
    unsigned top = 0, b = 0, c = 0, d = 0, a = 0;
    if (__get_cpuid(0, &top, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx &&
        __get_cpuid(1, &a, &b, &c, &d) && (a >> 8 & 15) + (a >> 20 & 255) >= 26)
        return 8192;
#endif
    return 0;
}

namespace {

#if defined(__linux__)

// Quota in cores of a cgroup v2 file "max 100000" / "200000 100000" or of the two v1 files; 0 when unlimited or unreadable.
double quota_v2(const std::string& dir) {
    std::ifstream file(dir + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0)
        return 0;
    const double q = std::strtod(quota.c_str(), nullptr);
    return q > 0 ? q / period : 0;
}

double quota_v1(const std::string& dir) {
    std::ifstream q(dir + "/cpu.cfs_quota_us"), p(dir + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    return (q >> quota) && (p >> period) && quota > 0 && period > 0 ? quota / period : 0;
}

// The tightest quota on the way from this process's group to the root: a parent's limit binds too.
double cgroup_cores() {
    double best = 0;
    auto take = [&](double q) {
        if (q > 0 && (best == 0 || q < best))
            best = q;
    };
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const size_t a = line.find(':'), b = line.find(':', a + 1);
        if (a == std::string::npos || b == std::string::npos)
            continue;
        const std::string controllers = line.substr(a + 1, b - a - 1);
        std::string path = line.substr(b + 1);
        const bool v2 = controllers.empty();
        if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos)
            continue;
        for (;;) {
            if (v2)
                take(quota_v2("/sys/fs/cgroup" + path));
            else
                take(quota_v1("/sys/fs/cgroup/" + controllers + path));
            const size_t cut = path.find_last_of('/');
            if (path.empty() || cut == std::string::npos)
                break;
            path.resize(cut);
        }
    }
    return best;
}

int physical_cores(const cpu_set_t& set) {
    std::set<std::pair<int, int>> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &set))
            continue;
        const std::string dir = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
        std::ifstream package(dir + "physical_package_id"), core(dir + "core_id");
        int p = 0, c = 0;
        if (!(package >> p) || !(core >> c))
            return 0;
        cores.insert({p, c});
    }
    return static_cast<int>(cores.size());
}

#endif

} // namespace

int default_threads() {
    int n = 1;
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        n = std::max(1, CPU_COUNT(&set));
    if (const int cores = physical_cores(set); cores > 0)
        n = std::min(n, cores);
    if (const double quota = cgroup_cores(); quota > 0)
        n = std::min(n, std::max(1, static_cast<int>(quota + 0.999)));
#endif
    return n;
}

} // namespace quaff
