"""What is wrong?"""
