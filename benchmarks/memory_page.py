def write_page(path):
    pass
