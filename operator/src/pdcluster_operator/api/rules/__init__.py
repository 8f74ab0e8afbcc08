"""The rules of admission, one module a subject; ``validate`` applies all of them."""
