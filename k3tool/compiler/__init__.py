"""From the operator graph to a plan: rules, e-graph, extraction, schedule, memory map, plan file.

`compile.compile_plan` is the entry. Nothing is imported here, because egglog and HDF5 are heavy and
most users of a plan need only `plan`.
"""
