// Set the theme before the first paint. Without a choice, the page follows the system.
try {
  const saved = localStorage.getItem("ramify-theme");
  if (saved) document.documentElement.dataset.theme = saved;
} catch {
  // a private window may have no storage
}
