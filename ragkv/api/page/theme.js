// Before the first paint, so that a chosen theme does not flash. Everything else is a module.
try {
  const theme = localStorage.getItem("ragkv.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  /* storage is forbidden here: the system's theme holds */
}
