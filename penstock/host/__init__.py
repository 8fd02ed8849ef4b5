"""The machine around Penstock: processes, private directories, at-exit hooks, the terminal."""
