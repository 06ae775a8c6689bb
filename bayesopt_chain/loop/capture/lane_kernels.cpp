#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>
#ifdef _OPENMP
#include <omp.h>
#endif

// Leaves of many chains between their own layout, chain after chain, and lanes, in which neighbours are neighbouring chains:
// element j of chain c is at c * stride + j there, and at j * chains + c here.

namespace {

constexpr int WIDE = 8, TILE = 64;

typedef float Lane __attribute__((vector_size(4 * WIDE), aligned(4)));
typedef int32_t Places __attribute__((vector_size(4 * WIDE)));
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

// eight rows of eight, in registers
inline void transpose(Lane* v) {
  Lane a[WIDE], b[WIDE];
  for (int k = 0; k < WIDE; k += 2) {
    a[k] = PICK(v[k], v[k + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[k + 1] = PICK(v[k], v[k + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int k = 0; k < WIDE; k += 4)
    for (int i = 0; i < 2; ++i) {
      b[k + 2 * i] = PICK(a[k + i], a[k + i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[k + 2 * i + 1] = PICK(a[k + i], a[k + i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int k = 0; k < WIDE / 2; ++k) {
    v[k] = PICK(b[k], b[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[k + 4] = PICK(b[k], b[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// rows of n elements to lanes, for up to TILE rows: row(k) is where row k begins
template <class T, class Row>
inline void tile_in(Row row, int rows, int64_t n, T* to, int64_t chains) {
  int r = 0;
  if (sizeof(T) == 4 && n >= WIDE)
    for (; r + WIDE <= rows; r += WIDE)
      for (int64_t j = 0; j < n; j += WIDE) {
        const int64_t at = j + WIDE <= n ? j : n - WIDE;  // the last tile overlaps
        Lane v[WIDE];
        for (int k = 0; k < WIDE; ++k) std::memcpy(&v[k], row(r + k) + at, sizeof(Lane));
        transpose(v);
        for (int l = 0; l < WIDE; ++l) std::memcpy(to + (at + l) * chains + r, &v[l], sizeof(Lane));
      }
  for (int64_t j = 0; j < n; ++j)
    for (int k = r; k < rows; ++k) to[j * chains + k] = row(k)[j];
}

template <class T, class Row>
inline void tile_out(Row row, int rows, int64_t n, const T* from, int64_t chains) {
  int r = 0;
  if (sizeof(T) == 4 && n >= WIDE)
    for (; r + WIDE <= rows; r += WIDE)
      for (int64_t j = 0; j < n; j += WIDE) {
        const int64_t at = j + WIDE <= n ? j : n - WIDE;
        Lane v[WIDE];
        for (int l = 0; l < WIDE; ++l) std::memcpy(&v[l], from + (at + l) * chains + r, sizeof(Lane));
        transpose(v);
        for (int k = 0; k < WIDE; ++k) std::memcpy(row(r + k) + at, &v[k], sizeof(Lane));
      }
  for (int64_t j = 0; j < n; ++j)
    for (int k = r; k < rows; ++k) row(k)[j] = from[j * chains + k];
}

struct Leaf {
  void* own;
  int64_t stride, size, bytes;  // stride between chains and size of a chain's in elements of so many bytes
  int64_t next;                 // bytes from those of a step to those of the next one, where each step has its own
};

template <class T>
void load(const Leaf& leaf, void* lanes, int64_t start, int64_t c, int rows, int64_t chains) {
  const T* own = static_cast<const T*>(leaf.own) + (start + c) * leaf.stride;
  tile_in<T>([=](int k) { return own + k * leaf.stride; }, rows, leaf.size, static_cast<T*>(lanes) + c, chains);
}

template <class T>
void store(const Leaf& leaf, const void* lanes, int64_t step, int64_t start, int64_t c, int rows, int64_t chains) {
  T* own = reinterpret_cast<T*>(static_cast<char*>(leaf.own) + step * leaf.next) + (start + c) * leaf.stride;
  tile_out<T>([=](int k) { return own + k * leaf.stride; }, rows, leaf.size, static_cast<const T*>(lanes) + c, chains);
}

struct Gather {
  const void* table;
  const int32_t* rows;            // in lanes, of all chains
  int64_t length, size, bytes;    // rows of the table, elements of a row, bytes of an element
  int64_t count, total;           // row numbers of a chain, chains in all
};

template <class T>
void gather(const Gather& g, void* lanes, int64_t start, int64_t c, int rows, int64_t chains) {
  const T* table = static_cast<const T*>(g.table);
  const int32_t length = int32_t(g.length);
  for (int64_t b = 0; b < g.count; ++b) {
    const int32_t* numbers = g.rows + b * g.total + start + c;
    int32_t at[TILE];
    for (int k = 0; k < rows; ++k) at[k] = numbers[k] < 0 ? numbers[k] + length : numbers[k];
    T* to = static_cast<T*>(lanes) + b * g.size * chains + c;
    if (g.size == 1)
      for (int k = 0; k < rows; ++k) to[k] = table[at[k]];
    else
      tile_in<T>([&](int k) { return table + at[k] * g.size; }, rows, g.size, to, chains);
  }
}

// row numbers of chains to lanes, and the least and the largest of them
template <class I>
void number(const I* rows, int32_t* lanes, int64_t stride, int64_t size, int64_t c, int n, int64_t chains, int64_t* range) {
  int32_t narrow[TILE][TILE];
  I low = range[0], high = range[1];
  for (int64_t b = 0; b < size; b += TILE) {
    const int many = int(size - b < TILE ? size - b : TILE);
    for (int k = 0; k < n; ++k) {
      const I* from = rows + (c + k) * stride + b;
      for (int j = 0; j < many; ++j) {
        low = from[j] < low ? from[j] : low;
        high = from[j] > high ? from[j] : high;
        narrow[k][j] = int32_t(from[j]);
      }
    }
    tile_in<float>([&](int k) { return reinterpret_cast<const float*>(narrow[k]); }, n, many,
                   reinterpret_cast<float*>(lanes) + b * chains + c, chains);
  }
  range[0] = low, range[1] = high;
}

// each tile of chains of every leaf, from chain `skip` of the block on
template <class Each>
void in_tiles(int64_t leaves, int64_t skip, int64_t chains, Each each) {
  for (int64_t i = 0; i < leaves; ++i)
    for (int64_t c = skip; c < chains; c += TILE) each(i, c, int(chains - c < TILE ? chains - c : TILE));
}

#define BY_SIZE(bytes, call)  \
  switch (bytes) {            \
    case 1: call(uint8_t);    \
    case 2: call(uint16_t);   \
    case 4: call(float);      \
    default: call(uint64_t);  \
  }

void load_all(const Leaf* leaves, void* const* lanes, int64_t n, int64_t start, int64_t chains) {
  in_tiles(n, 0, chains, [&](int64_t i, int64_t c, int rows) {
#define CALL(T) return load<T>(leaves[i], lanes[i], start, c, rows, chains)
    BY_SIZE(leaves[i].bytes, CALL)
#undef CALL
  });
}

void store_all(const Leaf* leaves, void* const* lanes, int64_t n, int64_t step, int64_t start, int64_t skip,
               int64_t chains) {
  in_tiles(n, skip, chains, [&](int64_t i, int64_t c, int rows) {
#define CALL(T) return store<T>(leaves[i], lanes[i], step, start, c, rows, chains)
    BY_SIZE(leaves[i].bytes, CALL)
#undef CALL
  });
}

void gather_all(const Gather* gathers, void* const* lanes, int64_t n, int64_t start, int64_t chains) {
  in_tiles(n, 0, chains, [&](int64_t i, int64_t c, int rows) {
#define CALL(T) return gather<T>(gathers[i], lanes[i], start, c, rows, chains)
    BY_SIZE(gathers[i].bytes, CALL)
#undef CALL
  });
}

// A call of a kernel with N addresses or integers of 64 bits. Those behind the last one that it takes are not read: in the
// calling conventions of C the caller removes them.
template <size_t>
using Argument = void*;
template <size_t... I>
void call(void* kernel, void* const* a, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(Argument<I>...)>(kernel)(a[I]...);
}
template <size_t N>
void call_of(void* kernel, void* const* a) {
  call(kernel, a, std::make_index_sequence<N>());
}

struct Kernel {
  void* at;
  int64_t arguments;  // a power of two from 8 to 1024

  void operator()(void* const* a) const {
    switch (arguments) {
      case 8: return call_of<8>(at, a);
      case 16: return call_of<16>(at, a);
      case 32: return call_of<32>(at, a);
      case 64: return call_of<64>(at, a);
      case 128: return call_of<128>(at, a);
      case 256: return call_of<256>(at, a);
      case 512: return call_of<512>(at, a);
      default: return call_of<1024>(at, a);
    }
  }
};

struct Thread {  // what a thread owns: leaves in lanes, and the arguments of all kernels, one kernel after the other
  void* const *chains, *const *batch, *const *tables, *const *report;
  void** arguments;
};

struct Given {  // the batch of a step: leaves and tables of all chains, and the addresses of what all chains share
  const Leaf* batch;
  const Gather* tables;
  void* const* shared;
};

struct Plan {
  const Leaf *chains, *report;
  const Kernel* kernels;
  const int64_t* shared;  // which arguments are addresses of what all chains share
  int64_t n_chains, n_report, n_batch, n_tables, n_kernels, n_shared, n_given, all, block;
};

// the steps from first to end, for the block of chains that begins at a chain
void run_block(const Plan& plan, const Thread& mine, const Given* each, int64_t first, int64_t end, int64_t begin) {
  const int64_t n = plan.block, start = begin + n <= plan.all ? begin : plan.all - n;  // the last block overlaps
  load_all(plan.chains, mine.chains, plan.n_chains, start, n);
  for (int64_t k = first; k < end; ++k) {
    if (k == first || plan.n_given > 1) {
      const Given& given = each[k % plan.n_given];
      load_all(given.batch, mine.batch, plan.n_batch, start, n);
      gather_all(given.tables, mine.tables, plan.n_tables, start, n);
      for (int64_t i = 0; i < plan.n_shared; ++i) mine.arguments[plan.shared[i]] = given.shared[i];
    }
    void* const* arguments = mine.arguments;
    for (int64_t i = 0; i < plan.n_kernels; arguments += plan.kernels[i++].arguments)
      plan.kernels[i](arguments);
    store_all(plan.report, mine.report, plan.n_report, k, start, begin - start, n);
  }
  store_all(plan.chains, mine.chains, plan.n_chains, 0, start, begin - start, n);
}

}  // namespace

// A product of matrices by a function of torch's, which takes handles of tensors, and returns another number than 0 if it fails.
extern "C" void product(void* torchs, void* out, void* a, void* b) {
  if (reinterpret_cast<int32_t (*)(void*, void*, void*)>(torchs)(out, a, b)) throw std::runtime_error("mm failed");
}

// The same, added to a tensor: out = c + a b.
extern "C" void sum_and_product(void* torchs, void* out, void* c, void* a, void* b) {
  using Function = int32_t (*)(void*, void*, void*, void*, double, double);
  if (reinterpret_cast<Function>(torchs)(out, c, a, b, 1.0, 1.0)) throw std::runtime_error("addmm failed");
}

extern "C" void copy(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, bytes); }

// Steps for one block of chains after the other; a thread that is free takes the next. The message of an exception of a
// kernel (a row out of range) is written to what, of 512 bytes; the blocks that are left are not begun then.
extern "C" void run_blocks(const Plan* plan, const Thread* threads, const Given* given, int64_t first, int64_t end, int many,
                           char* what) {
  const int64_t blocks = (plan->all + plan->block - 1) / plan->block;
  std::atomic<bool> fails{false};
  const auto run = [&](int64_t b, int thread) {
    if (!fails) try {
        run_block(*plan, threads[thread], given, first, end, b * plan->block);
      } catch (const std::exception& error) {
        if (!fails.exchange(true)) std::strncpy(what, error.what(), 511);
      }
  };
  // kernels with threads of their own must not be called within a parallel region, be it of one thread
  if (many < 2)
    for (int64_t b = 0; b < blocks; ++b) run(b, 0);
#ifdef _OPENMP
  else {
#pragma omp parallel for schedule(dynamic) num_threads(many)
    for (int64_t b = 0; b < blocks; ++b) run(b, omp_get_thread_num());
  }
#endif
}

// row numbers [chains, size] to lanes [size, chains]; range: the least and the largest number so far
extern "C" void number_lanes(const void* rows, int wide, int32_t* lanes, int64_t stride, int64_t size, int64_t chains,
                             int64_t* range, int threads) {
  int64_t low = range[0], high = range[1];
#pragma omp parallel for schedule(static) num_threads(threads) reduction(min : low) reduction(max : high) if (threads > 1)
  for (int64_t c = 0; c < chains; c += TILE) {
    const int n = int(chains - c < TILE ? chains - c : TILE);
    int64_t mine[2] = {0, 0};
    if (wide)
      number(static_cast<const int64_t*>(rows), lanes, stride, size, c, n, chains, mine);
    else
      number(static_cast<const int32_t*>(rows), lanes, stride, size, c, n, chains, mine);
    low = mine[0] < low ? mine[0] : low;
    high = mine[1] > high ? mine[1] : high;
  }
  range[0] = low, range[1] = high;
}
