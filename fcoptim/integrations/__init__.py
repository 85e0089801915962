"""One module for each outside library, imported only where that library is in use."""
