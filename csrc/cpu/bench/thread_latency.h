// How far apart the CPUs are that torch's threads run on.
#pragma once

namespace overtone {

// Seconds that a cache line takes from one of torch's threads to another and back, the shortest of many; NaN where
// torch has one thread, or the other one did not answer.
double line_round_trip();

}  // namespace overtone
