"""Running a program: the interpreter's build and loader, images, rank processes, records."""
