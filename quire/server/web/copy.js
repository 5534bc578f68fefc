// Copying, and saying so on the button that was pressed.

export async function copyText(element, text) {
  const label = (element.dataset.label ??= element.textContent);
  try {
    await navigator.clipboard.writeText(text);
    element.textContent = "Copied";
  } catch {
    // Not over plain HTTP: then the address bar has it.
    if (element.href) history.replaceState(null, "", element.href);
    element.textContent = element.href ? "In the address bar" : "Not allowed here";
  }
  setTimeout(() => (element.textContent = label), 1500);
}
