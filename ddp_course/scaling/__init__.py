"""Where does the time of a step go, and what would more ranks do?"""
