def find_problems(*a):
    return []
