"""Studies as users meet them: tp-run study, its tables and page, and plans judged by one."""
