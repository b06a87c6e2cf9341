// How far two cores are from each other: nanoseconds until one has a line of memory that the other has written. 20 to 40 where
// they share a cache, some 90 on one socket, 300 between two. A virtual machine's cores may be any of these, and change.

#ifdef _OPENMP
#include <omp.h>
#endif

#include <atomic>
#include <chrono>

extern "C" {

// of `count` hops there and back; 0 without a second thread, or where one did not run for 50 ms
double rondel_hop(int count) {
    double found = 0;
#ifdef _OPENMP
    alignas(128) std::atomic<int> line{0};
    alignas(128) std::atomic<bool> over{false};
    auto seconds = [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); };
#pragma omp parallel num_threads(2)
    {
        if (omp_get_num_threads() == 2 && omp_get_thread_num() == 0) {
            double began = seconds();
            for (int i = 0; i < count && !over; i++) {
                line.store(2 * i + 1, std::memory_order_release);
                for (int spins = 1; line.load(std::memory_order_acquire) != 2 * i + 2; spins++)
                    if (spins % 4096 == 0 && seconds() - began > 0.05) {
                        over = true;
                        break;
                    }
            }
            if (!over) found = (seconds() - began) / count / 2 * 1e9;
        } else if (omp_get_thread_num() == 1)
            for (int i = 0; i < count && !over; i++) {
                while (line.load(std::memory_order_acquire) != 2 * i + 1 && !over.load(std::memory_order_relaxed)) {
                }
                line.store(2 * i + 2, std::memory_order_release);
            }
    }
#endif
    return found;
}

}
