"""What the benchmarks share: races in fresh processes, workloads, tables, charts and JSON."""
