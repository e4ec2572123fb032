// faults.cpp: words of pinned memory in which kernels report ids that are out of range.
#include <mutex>
#include <vector>

#include "driver.h"
#include "transfer.h"

using namespace kvbm_driver;

namespace {

// A word belongs to one copy, until its event is done and no graph uses it.  So faults of different copies are not mixed up.
std::mutex faults_mutex;
std::vector<kvbm_fault*>& free_faults = *new std::vector<kvbm_fault*>;  // its capacity is the number of all words
Retired& retired_faults = *new Retired;
size_t num_faults = 0;

constexpr size_t kFaultsAtOnce = 512;  // words of a page
constexpr int kMostFaultQueries = 4;

// The driver calls it too, on any thread, when a graph is destroyed.
void leave_fault(void* left) {
  auto* const fault = static_cast<kvbm_fault*>(left);
  std::lock_guard<std::mutex> lock(faults_mutex);
  if (--fault->users == 0) free_faults.push_back(fault);
}

// Do not call it with faults_mutex held: the driver may wait for a thread of its own, which is in leave_fault.
int make_faults() {
  void* memory = nullptr;
  RETURN_IF_FAILED(CU(MemHostAlloc, &memory, kFaultsAtOnce * sizeof(kvbm_fault), kHostPortable | kHostMapped));
  std::lock_guard<std::mutex> lock(faults_mutex);
  free_faults.reserve(num_faults + kFaultsAtOnce);
  for (size_t i = 0; i < kFaultsAtOnce; ++i) free_faults.push_back(static_cast<kvbm_fault*>(memory) + i);
  num_faults += kFaultsAtOnce;
  return KVBM_OK;
}

kvbm_fault* take_fault() {
  std::lock_guard<std::mutex> lock(faults_mutex);
  if (free_faults.empty()) return nullptr;
  kvbm_fault* const fault = free_faults.back();
  free_faults.pop_back();
  *fault = {0, 1};
  return fault;
}

}  // namespace

namespace kvbm_driver {

// Every replay of a captured copy may write its word, so the graph owns it too.
int give_fault_to_graph(const kvbm_batch& batch, Stream stream, int* captured) {
  Handle graph = nullptr;
  RETURN_IF_FAILED(capturing_graph(stream, &graph));
  if (!graph) return KVBM_OK;
  auto* const fault = reinterpret_cast<kvbm_fault*>(batch.fault);  // `pair` is its first member
  *captured = 1;
  {
    std::lock_guard<std::mutex> lock(faults_mutex);
    ++fault->users;
  }
  const int given = give_to_graph(graph, fault, leave_fault);
  if (given != KVBM_OK) leave_fault(fault);
  return given;
}

}  // namespace kvbm_driver

extern "C" {

int kvbm_fault_take(int device, kvbm_fault** fault) {
  *fault = nullptr;
  Current current;
  RETURN_IF_FAILED(current.open(device));
  RelaxedCapture relaxed;
  try {
    retired_faults.collect(kMostFaultQueries);
    while (!(*fault = take_fault())) RETURN_IF_FAILED(make_faults());
  } catch (...) {
    return check("malloc", KVBM_NO_MEMORY);
  }
  return KVBM_OK;
}

void kvbm_fault_give(kvbm_fault* fault, int device, uint64_t event) {
  if (!fault || start() != KVBM_OK) return;  // after a fork it belongs to the parent
  if (event)
    retired_faults.add(device, reinterpret_cast<Handle>(event), fault, [](int, void* left) { leave_fault(left); });
  else
    leave_fault(fault);
}

}  // extern "C"
