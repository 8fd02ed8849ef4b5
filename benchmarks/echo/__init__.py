"""The benchmark ``echo``: data echoing with a slow source."""
