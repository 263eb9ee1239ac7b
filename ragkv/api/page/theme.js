// Runs before the first paint, so that the page does not flash in the wrong theme. Everything else is a module.
try {
  const theme = localStorage.getItem("ragkv.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  /* storage is forbidden here: the system's theme holds */
}
