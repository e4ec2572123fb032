// transfer.h: functions that the files of transfers share: copy_engine.cpp, staging.cpp and faults.cpp for transfer.cpp.
#pragma once

#include "driver.h"

namespace kvbm_driver {

// copy_engine.cpp: copies a batch with ids on the host by loop nests of bytes, in the order of `stream`.  The tables of the batch
// are those of the nests.  Adds the number of driver calls to *submissions.
int copy_nests(const kvbm_route& route, const kvbm_args* const* nests, uint32_t count, const kvbm_batch& batch, Device* device,
               Stream stream, uint64_t* submissions);

// staging.cpp: copies a batch through the ring of the route.
int copy_staged(const kvbm_route& route, const kvbm_batch& batch, Stream stream, uint64_t* submissions);
// A stream of the route's GPU, for a caller whose stream belongs to another GPU.
int stream_beside(const kvbm_route& route, Device* device, Stream callers, Stream* mine);

// faults.cpp: if `stream` is being captured, the fault word of the batch also belongs to the graph, and *captured is set.
int give_fault_to_graph(const kvbm_batch& batch, Stream stream, int* captured);

}  // namespace kvbm_driver
