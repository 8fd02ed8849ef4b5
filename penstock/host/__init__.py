"""The machine around Penstock: processes, cgroups, private directories, at exit, the terminal."""
