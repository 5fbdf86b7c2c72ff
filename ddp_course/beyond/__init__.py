"""When is DDP not enough, and what then?"""
