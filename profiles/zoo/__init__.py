"""Built-in tasks: real data that needs no download, and well-known nets on synthetic samples.

Adding one: a module here with `make_task(name, argument)`, which gives what follows
`profiles.tasks.task.Task`, and a line among the entry points "timeprest.tasks" of setup.cfg.
"""
