"""How is a program watched that knows nothing of the course? `inside/` runs in its processes, the rest beside them."""
