"""Files: uploads are checked line by line and stored, downloads are made ready a few at a time.

Its files:

    downloads.py          sends files of versions: a few at a time are made ready, and wait on disk for slow readers
    file_store.py         checks files of items, and stores them
    files.py              serves /v1/files
"""
