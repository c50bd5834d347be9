// Swagger UI on this service's own document; with the key of this tab, which the playground knows too.
const KEY = "hallutracer.key";
const form = document.getElementById("key-form");
const withKey = () => (sessionStorage.getItem(KEY) ? { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});

// Swagger UI's own dark colours, as the system asks for them.
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();

async function load() {
  const problem = document.getElementById("problem");
  let response;
  try {
    response = await fetch("openapi.json", { headers: withKey(), cache: "no-store" });
  } catch {
    problem.textContent = "The service did not answer. Is it still running?";
    form.hidden = false;
    return;
  }
  if (!response.ok) {
    problem.textContent = response.status !== 401 ? `The service answered ${response.status}.` :
      sessionStorage.getItem(KEY) ? "The service does not know this key." : "";
    sessionStorage.removeItem(KEY);
    form.hidden = false;
    document.getElementById("key").focus();
    return;
  }
  form.hidden = true;
  SwaggerUIBundle({
    dom_id: "#reference",
    spec: await response.json(),
    deepLinking: true,
    validatorUrl: null, // the validator is on the internet
    requestInterceptor: (request) => Object.assign(request, { headers: { ...withKey(), ...request.headers } }),
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, document.getElementById("key").value.trim());
  load();
});
load();
