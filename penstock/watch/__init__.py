"""Live status of running loaders: what they publish, and the terminal, web and Prometheus views."""
