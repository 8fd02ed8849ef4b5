"""Code that several benchmarks share: races in fresh processes, workloads, tables, charts, JSON."""
