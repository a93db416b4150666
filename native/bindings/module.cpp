#include "bindings.h"
#include "numerics.h"

NB_MODULE(_native, m) {
    m.attr("NUMERICS_VERSION") = quaff::kNumericsVersion;
    m.attr("PAGE") = quaff::kPage;
    quaff::bind_machine(m);
    quaff::bind_model(m);
    quaff::bind_sample(m);
    quaff::bind_source(m);
}
