"""A decode step exported, packaged by AOTInductor and run in C++, without Python."""
