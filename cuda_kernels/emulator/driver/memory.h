// Memory that calls give out, and what is copied and filled.
#pragma once
#include "work.h"

namespace driver {

// Allocates on the heap and remembers whose it is; Refusal where there is not enough.
Allocation& allocate(size_t size, int device, Allocation::Place place, const std::shared_ptr<Pool>& pool);
// Frees what `allocate` gave; throws device::Fault for any other address.
void release(uint64_t address);
// The same, and nothing where the address is not live.
void release_if_live(uint64_t address);
// Remembers memory that the heap gave out already: a variable of a module.
void adopt(uint64_t address, size_t size, int device);
// The allocation that holds an address, null for none.
const Allocation* allocation_of(uint64_t address);
// The last one that has some of these bytes, null for none.
const Allocation* allocation_in(uint64_t address, size_t size);
// Bytes that a device has, and how many of them are given out.
size_t total_memory();
size_t used_memory(int device);

// The task that fills `count` elements of 1, 2 or 4 bytes with the lowest bytes of a value.
Task fill_task(uint64_t to, unsigned value, size_t element, size_t count);

// Allocates in the order of a stream; frees in its order.
uint64_t allocate_in_stream(size_t size, const std::shared_ptr<Pool>& pool, CUstream stream);
void free_in_stream(uint64_t address, CUstream stream);

}  // namespace driver
